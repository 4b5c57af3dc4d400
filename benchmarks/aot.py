"""Programs made ahead of time against ExecuTorch, AOTInductor, ONNX Runtime and OpenVINO alone, and eager.

``python -m benchmarks.aot``: latency with one and two threads (:mod:`.aot_latency`), the runtime's own cost per call,
file sizes, and process start to first result and load time. Engines that are not installed are left out, and said so.
``--quick``: the MLP alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .aot_latency import latency
from .aot_models import MODELS, Example, build
from .common import Timed, interleave, table

OURS = ("inductor", "openvino", "executorch")
PEERS = {
    "inductor": "AOTInductor alone",
    "openvino": "OpenVINO alone",
    "executorch": "ExecuTorch + XNNPACK",
    "onnx": "ONNX Runtime",
}


def _installed(name: str) -> bool:
    needed = {"onnx": ("onnxruntime", "onnx", "onnxscript"), "inductor": ()}.get(name, (name,))
    return all(find_spec(module) is not None for module in needed)


# -- making the files -------------------------------------------------------------------------------------------------
def _make_peer(name: str, example: Example, exported: Any, folder: Path) -> Path:
    """The peer's own file for a model."""
    if name == "inductor":
        path = folder / "aoti.pt2"
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        return path
    if name == "openvino":
        import openvino as ov

        path = folder / "ov.xml"
        ov.save_model(ov.convert_model(exported), str(path), compress_to_fp16=False)
        return path
    if name == "executorch":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        path = folder / "et.pte"
        made = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
        path.write_bytes(made.buffer)
        return path
    path = folder / "model.onnx"
    torch.onnx.export(example.module, example.args, str(path), dynamo=True, external_data=False)
    return path


def make(model: str, folder: Path, engines: Sequence[str]) -> dict[str, str]:
    """Every engine's file for a model, ours and theirs; label → path. What fails is left out with its reason."""
    from torchport import aot

    example = build(model)
    with torch.no_grad():
        exported = torch.export.export(example.module, example.args)
    found: dict[str, str] = {}
    for name in OURS:
        if name not in engines or not _installed(name):
            continue
        path = folder / f"ours-{name}.pt2"
        lowered = aot.lower(exported, backend=name)
        lowered.save(path)
        left = lowered.left["forward"]
        if left:
            print(f"{model} on {name}: {len(left)} operators are left to PyTorch", flush=True)
        found[f"torchport {name}"] = str(path)
    for name, label in PEERS.items():
        if name not in engines:
            continue
        if not _installed(name):
            print(f"{label} is not installed and left out", flush=True)
            continue
        try:
            found[label] = str(_make_peer(name, example, exported, folder))
        except Exception as error:
            print(f"{model}: {label} cannot compile it: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return found


# -- starting ----------------------------------------------------------------------------------------------------------
START = """
import sys, time
begun = time.perf_counter()
import numpy
arrays = [value for _, value in sorted(numpy.load({inputs!r}).items())]
if {kind!r} == "ours":
    import torchport.runtime as runtime
    if {arrays_in!r} == "torch":
        import torch
    else:
        import openvino
    imported = time.perf_counter()
    method = runtime.load({path!r}).load_method()
    loaded = time.perf_counter()
    if {arrays_in!r} == "torch":
        arrays = [torch.from_numpy(array) for array in arrays]
    method(*arrays)
else:
    sys.path.insert(0, {root!r})
    if {kind!r} in ("pte", "pt2"):
        import torch
        import torch._inductor
    if {kind!r} == "pte":
        from executorch.extension.pybindings import portable_lib
    if {kind!r} == "xml":
        import openvino
    if {kind!r} == "onnx":
        import onnxruntime
    imported = time.perf_counter()
    if {kind!r} == "xml":
        run = openvino.Core().compile_model({path!r}, "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})
        run = run.create_infer_request()
        loaded = time.perf_counter()
        run.infer(arrays)
    elif {kind!r} == "onnx":
        session = onnxruntime.InferenceSession({path!r}, providers=["CPUExecutionProvider"])
        loaded = time.perf_counter()
        session.run(None, {{one.name: array for one, array in zip(session.get_inputs(), arrays)}})
    elif {kind!r} == "pte":
        module = portable_lib._load_for_executorch({path!r})
        loaded = time.perf_counter()
        module.forward([torch.from_numpy(array) for array in arrays])
    else:
        module = torch._inductor.aoti_load_package({path!r})
        loaded = time.perf_counter()
        module(*[torch.from_numpy(array) for array in arrays])
done = time.perf_counter()
print("times", loaded - imported, done - begun)
"""


def start(path: str, inputs: Path, repeats: int) -> tuple[float, float]:
    """Best of several processes: seconds to load (file to ready), and from process start to the first result."""
    ours = Path(path).name.startswith("ours-")
    code = START.format(
        path=path,
        inputs=str(inputs),
        kind="ours" if ours else Path(path).suffix[1:],
        arrays_in="numpy" if "openvino" in path else "torch",
        root=str(Path(__file__).parents[1]),
    )
    best_load = best_total = float("inf")
    for _ in range(repeats):
        begun = perf_counter()
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        total = perf_counter() - begun
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        loaded = float(next(line for line in done.stdout.splitlines() if line.startswith("times")).split()[1])
        best_load, best_total = min(best_load, loaded), min(best_total, total)
    return best_load, best_total


def _batched(run: Callable[[], object], calls: int) -> Timed:
    def batch() -> float:
        begun = perf_counter()
        for _ in range(calls):
            run()
        return (perf_counter() - begun) / calls

    return batch


# -- the runtime's own cost -----------------------------------------------------------------------------------------
def overhead(counts: Sequence[int], seconds: float) -> list[list[str]]:
    """Microseconds per call of a program over calling its backend directly, by number of inputs; best and median."""
    from torchport import aot
    from torchport.backend.interface import Backend, Processed, TensorData
    from torchport.core.specs import TensorSpec

    spec = TensorSpec((4,), torch.float32, (1,))

    class Nothing(Backend):
        name = "benchmark_nothing"

        def preprocess(self, graph: Any, specs: Any) -> Processed:
            return Processed(b"nothing")

        def init(self, processed: Any, specs: Any, context: Any) -> Any:
            return TensorData(context.device, spec, torch.zeros(4))

        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            return [handle]

    class Sum(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return torch.stack(args).sum(0)

    backend = Nothing()
    rows: list[list[str]] = []
    for count in counts:
        tensors = [torch.rand(4) for _ in range(count)]
        method = aot.lower(Sum(), tuple(tensors), backend=backend).program.load_method()
        direct = method._delegates[0]
        data = [TensorData(direct.context.device, spec, tensor) for tensor in tensors]
        handle, context = direct._handle, direct.context

        def ours(method: Any = method, tensors: Any = tensors) -> object:
            return method(*tensors)

        def engine(handle: Any = handle, data: Any = data, context: Any = context) -> object:
            return backend.execute(handle, data, context)

        found = interleave({"ours": _batched(ours, 500), "engine": _batched(engine, 500)}, 60, 3, seconds)
        best = (found["ours"].best - found["engine"].best) * 1e6
        median = (found["ours"].median - found["engine"].median) * 1e6
        rows.append([str(count), f"{best:.1f} / {median:.1f}", f"{10 + count}"])
    return rows


# -- the whole --------------------------------------------------------------------------------------------------------
def _size(path: str) -> int:
    return os.path.getsize(path) + (os.path.getsize(path[:-4] + ".bin") if path.endswith(".xml") else 0)


def _make_files(model: str, folder: Path, engines: Sequence[str]) -> None:
    """Compile a model for engines, into a folder that has its inputs too, and maybe other engines' files already."""
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "paths.json"
    paths = json.loads(listed.read_text()) if listed.exists() else {}
    paths |= make(model, folder, engines)
    numpy.savez(folder / "inputs.npz", **{f"input{i}": arg.numpy() for i, arg in enumerate(build(model).args)})
    listed.write_text(json.dumps(paths))


def _report_start(model: str, folder: Path, repeats: int) -> None:
    rows: list[list[str]] = []
    for label, path in json.loads((folder / "paths.json").read_text()).items():
        loaded, total = start(path, folder / "inputs.npz", repeats)
        rows.append([label, f"{_size(path) / 1e6:.2f}", f"{loaded * 1e3:.0f}", f"{total * 1e3:.0f}"])
    header = ["", "MB", "load, ms", "process start to first result, ms"]
    table(f"{model}: file and start (best of {repeats})", header, rows)


def _report_latency(model: str, folder: Path, threads: int, seconds: float) -> None:
    found = latency(model, json.loads((folder / "paths.json").read_text()), threads, seconds)
    peer = min(one.best for label, one in found.items() if not label.startswith("torchport") and one.seconds)
    rows = [
        [label, one.cell(1e3), f"{one.best / peer:.2f}" if one.seconds else "—"]
        for label, one in sorted(found.items(), key=lambda item: item[1].best)
    ]
    ours = min((one.best for label, one in found.items() if label.startswith("torchport")), default=float("nan"))
    title = f"{model}: latency with {threads} thread{'s' * (threads > 1)}, ms, best / median"
    table(f"{title}; our best to the best peer: {ours / peer:.2f}", ["", "ms", "to the best peer"], rows)


PARTS = ("overhead", "make", "start", "latency1", "latency2")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="programs made ahead of time, and peers")
    parser.add_argument("--quick", action="store_true", help="the MLP alone, and short")
    parser.add_argument("--only", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; with --files, one after another"
    )
    parser.add_argument("--engines", default=",".join(PEERS), help=f"what to make: of {', '.join(PEERS)}")
    parser.add_argument("--files", type=Path, help="a folder for the compiled files, to measure them later")
    parser.add_argument("--repeats", type=int, help="processes started per engine")
    parser.add_argument("--seconds", type=float, help="for how long a model's engines are timed, per number of threads")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seconds, repeats = (3.0, 2) if options.quick else (10.0, 5)
    seconds, repeats = options.seconds or seconds, options.repeats or repeats
    parts = options.parts.split(",")
    if "overhead" in parts:
        rows = overhead((1, 2, 4, 8, 16), seconds / 2)
        header = ["inputs", "µs", "target"]
        table("Runtime: cost per call over the engine alone, µs, best / median", header, rows)
    for model in ["mlp"] if options.quick else options.only.split(","):
        with contextlib.ExitStack() as stack:
            folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if "make" in parts:
                _make_files(model, folder / model, options.engines.split(","))
            if "start" in parts:
                _report_start(model, folder / model, repeats)
            for threads in (1, 2):
                if f"latency{threads}" in parts:
                    _report_latency(model, folder / model, threads, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
