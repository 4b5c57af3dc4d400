"""Latency of compiled files, every engine in a process of its own.

Engines keep pools of threads that spin for a while when a call is over: in one process, or without a pause, the pool of
one has the processor that the next one asks for. So a process per engine is asked in turn, after a pause.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .aot_models import build
from .common import Samples, interleave

__all__ = ["latency"]

Runner = Callable[[], object]
_BATCH_SECONDS = 0.02
_PAUSE_SECONDS = 0.03


def _load_peer(path: str, arrays: Sequence[Any], threads: int) -> Runner:
    if path.endswith(".xml"):
        import openvino as ov

        config = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = ov.Core().compile_model(path, "CPU", config)
        request = compiled.create_infer_request()
        return lambda: request.infer(list(arrays), share_inputs=True, share_outputs=True)
    if path.endswith(".onnx"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feeds = {one.name: array for one, array in zip(session.get_inputs(), arrays, strict=True)}
        return lambda: session.run(None, feeds)
    tensors = [torch.from_numpy(array) for array in arrays]
    if path.endswith(".pte"):
        from executorch.extension.pybindings import portable_lib

        module = portable_lib._load_for_executorch(path)
        return lambda: module.forward(tensors)
    loaded = torch._inductor.aoti_load_package(path)
    return lambda: loaded(*tensors)


def _load_ours(path: str, arrays: Sequence[Any], threads: int) -> Runner:
    import torchport.runtime as runtime

    options = {"openvino": {"INFERENCE_NUM_THREADS": threads}} if "openvino" in path else {}
    method = runtime.load(path, backend_options=options).load_method()
    given: Sequence[Any] = arrays if "openvino" in path else [torch.from_numpy(array) for array in arrays]
    return lambda: method(*given)


def _limit_executorch(threads: int) -> None:
    """Its pool has a thread per core otherwise."""
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(threads)


def load(path: str, arrays: Sequence[Any], threads: int) -> Runner:
    """A function that runs a file on inputs."""
    if path.endswith(".pte") or "executorch" in Path(path).name:
        _limit_executorch(threads)
    return (_load_ours if Path(path).name.startswith("ours-") else _load_peer)(path, arrays, threads)


def _eager(model: str) -> Runner:
    example = build(model)

    def run() -> object:
        with torch.no_grad():
            return example.module(*example.args)

    return run


def _serve(pipe: Connection, model: str, path: str, threads: int) -> None:
    """In the engine's process: load a file, then run a batch and send its seconds per call whenever asked."""
    torch.set_num_threads(threads)
    try:
        run = load(path, [arg.numpy() for arg in build(model).args], threads) if path else _eager(model)
        for _ in range(5):
            run()
        begun = perf_counter()
        run()
        calls = max(1, int(_BATCH_SECONDS / max(perf_counter() - begun, 1e-6)))
        pipe.send("")
        while pipe.recv():
            run()  # wakes what has gone to sleep meanwhile
            begun = perf_counter()
            for _ in range(calls):
                run()
            pipe.send((perf_counter() - begun) / calls)
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


class _Engine:
    """A process that runs one file, seen from here."""

    def __init__(self, model: str, path: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, path, threads), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has loaded. Raises what loading raised."""
        failed = self.pipe.recv()
        if failed:
            raise RuntimeError(failed)

    def batch(self) -> float:
        """Seconds per call."""
        time.sleep(_PAUSE_SECONDS)
        self.pipe.send(True)
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def latency(model: str, paths: dict[str, str], threads: int, seconds: float) -> dict[str, Samples]:
    """Every engine's seconds per call, in turn, and PyTorch's own; label → path of its file."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    engines: dict[str, _Engine] = {}
    try:
        for label, path in {"eager": "", **paths}.items():
            engines[label] = _Engine(model, path, threads)
            try:
                engines[label].ready()
            except (RuntimeError, EOFError) as error:
                print(f"{label} cannot run: {error}", flush=True)
                engines.pop(label).stop()
        return interleave({label: engine.batch for label, engine in engines.items()}, 400, 3, seconds)
    finally:
        for engine in engines.values():
            engine.stop()
