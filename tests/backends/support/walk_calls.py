"""Every call the walk makes, by name: what a user could type on a tensor of the device, with plausible arguments.

Run as a script it makes the calls whose names it is given, in one process, and prints a JSON line before and after
each: ``python walk_calls.py DEVICE BACKEND < names``.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import inspect
import io
import json
import multiprocessing.reduction
import os
import pickle
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import torch.utils.dlpack

Call = Callable[[torch.device], Any]

NOT_CALLED = {
    # Ends or blocks the process, or changes it for every later call, on any device.
    "_exit", "set_default_device", "set_default_dtype", "set_default_tensor_type", "set_num_threads",
    "set_num_interop_threads", "init_num_threads", "set_printoptions", "set_flush_denormal", "compile",
    "use_deterministic_algorithms", "set_deterministic_debug_mode", "set_float32_matmul_precision", "classproperty",
    "set_warn_always", "autocast_increment_nesting", "autocast_decrement_nesting", "import_ir_module",
    "set_autocast_cache_enabled", "set_autocast_dtype", "set_autocast_enabled", "set_autocast_cpu_enabled",
    "set_autocast_cpu_dtype", "set_autocast_gpu_dtype", "set_autocast_ipu_dtype", "set_autocast_ipu_enabled",
    "set_autocast_xla_dtype", "set_autocast_xla_enabled", "set_anomaly_enabled", "read_vitals", "set_vital", "fork",
    "wait", "_assert_async", "_functional_assert_async", "cond", "while_loop", "set_grad_enabled", "export",
    "GradScaler", "seed", "initial_seed", "typename",
}  # fmt: skip


RAW_POINTERS = {"_expired", "_free_weak_ref", "_new_with_weak_ptr", "_set_cdata", "_set_from_file", "_write_file"}
"""Private storage methods that take the caller's word for an address: any integer kills the process on the CPU, too."""

KILLS_ON_THE_CPU = {"special storage resize", *(f"storage untyped.__delitem__ {place}" for place in range(1, 9))}
"""Public calls of which PyTorch itself dies on CPU tensors; the device must survive them."""


def vector(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).to(device)


def arguments(device: torch.device) -> list[tuple[Any, ...]]:
    """Plausible argument lists for a tensor method: none, numbers, tensors, and what indexing functions take."""
    x = vector(device)
    index = torch.tensor([0, 1], device=device)
    return [
        (), (1,), (0,), (0.5,), (x + 1,), (0, 1), (0, index), (0, index, x), (x > 2,), (x > 2, 1.0), (x > 2, x),
        (torch.float64,), (device,), ("cpu",), ((3, 2),), ((2, 3), (3, 1)), (3, 2), (x, x), (x.t(),), (1, 0, 1),
        (None,), (lambda t: None,), (0, index[:, None]), (0, index[:, None], 1.0), ("sum",), (x, 0), (index,),
        (2, 3), (x, x, x), ([0, 1],), (True,), (torch.channels_last,),
    ]  # fmt: skip


def _method(name: str, place: int) -> Call:
    def call(device: torch.device) -> Any:
        return getattr(vector(device), name)(*arguments(device)[place])

    return call


def _member(name: str) -> Call:
    def call(device: torch.device) -> Any:
        value = getattr(vector(device), name)
        return value() if inspect.isroutine(value) and name.startswith("__") else value

    return call


def _function(module: Any, name: str, place: int) -> Call:
    def call(device: torch.device) -> Any:
        return getattr(module, name)(vector(device), *arguments(device)[place])

    return call


STORAGE_ARGUMENTS: list[tuple[Any, ...]] = [(), (0,), (0, 1.0), (1, 2), ("cpu",), (b"",), (1024,), (False,), (None,)]


def _storage(kind: str, name: str, place: int) -> Call:
    def call(device: torch.device) -> Any:
        value = getattr(_storage_of(vector(device), kind), name)
        return value(*STORAGE_ARGUMENTS[place]) if callable(value) else value

    return call


def _storage_of(x: torch.Tensor, kind: str) -> Any:
    if kind == "untyped":
        return x.untyped_storage()
    return x.storage()


def _pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def _saved(x: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _sent_to_a_process(x: torch.Tensor) -> Any:
    return bytes(multiprocessing.reduction.ForkingPickler.dumps(x))


def _as_mapped_file(x: torch.Tensor) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, size=6, shared=True).copy_(x.flatten()).sum().item()


SPECIAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of a view": lambda x: copy.deepcopy(x.t()[1:]),
    "deepcopy of a leaf": lambda x: copy.deepcopy(x.requires_grad_()),
    "deepcopy of storage": lambda x: copy.deepcopy(x.untyped_storage()),
    "pickle": _pickled,
    "pickle of storage": lambda x: _pickled(x.untyped_storage()),
    "pickle of typed storage": lambda x: _pickled(x.storage()),
    "pickle protocol 5": lambda x: pickle.loads(pickle.dumps(x, protocol=5)),
    "reduce_ex": lambda x: x.__reduce_ex__(2),
    "save": _saved,
    "save in the old format": lambda x: _saved(x, _use_new_zipfile_serialization=False),
    "save of storage": lambda x: _saved(x.untyped_storage()),
    "share_memory_": lambda x: x.share_memory_(),
    "is_shared": lambda x: x.is_shared(),
    "sent to a process": _sent_to_a_process,
    "storage sent to a process": lambda x: _sent_to_a_process(x.untyped_storage()),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "from_dlpack": torch.from_dlpack,
    "dlpack method": lambda x: x.__dlpack__(),
    "dlpack device": lambda x: x.__dlpack_device__(),
    "numpy from_dlpack": lambda x: np.from_dlpack(x),
    "numpy": lambda x: x.numpy(),
    "numpy forced": lambda x: x.numpy(force=True),
    "numpy asarray": np.asarray,
    "numpy array of dtype": lambda x: np.array(x, dtype=np.float64),
    "numpy function": lambda x: np.add(x, 1),
    "numpy plus tensor": lambda x: np.ones((2, 3)) + x,
    "memoryview": memoryview,
    "bytes": bytes,
    "array interface": lambda x: x.__array_interface__,
    "cuda array interface": lambda x: x.__cuda_array_interface__,
    "data_ptr": lambda x: x.data_ptr(),
    "storage data_ptr": lambda x: x.untyped_storage().data_ptr(),
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32),
    "set_ to itself": lambda x: x.set_(x),
    "set_ to storage": lambda x: x.set_(x.untyped_storage()),
    "set_ to storage and shape": lambda x: x.set_(x.untyped_storage(), 0, (2,), (1,)),
    "set_ to host storage": lambda x: x.set_(torch.ones(6).untyped_storage(), 0, (2,), (1,)),
    "host set_ to storage": lambda x: torch.ones(6).set_(x.untyped_storage(), 0, (2,), (1,)),
    "tensor of storage": lambda x: torch.tensor([], device=x.device).set_(x.untyped_storage()),
    "list of storage": lambda x: x.untyped_storage().tolist(),
    "storage item": lambda x: x.untyped_storage()[0],
    "storage write": lambda x: x.untyped_storage().__setitem__(0, 1),
    "typed storage list": lambda x: list(x.storage()),
    "storage resize": lambda x: (x.untyped_storage().resize_(0), x.sum().item()),
    "storage grows": lambda x: (x.untyped_storage().resize_(4096), x.sum().item()),
    "storage copy": lambda x: x.untyped_storage().copy_(torch.ones(6).untyped_storage()),
    "host storage copy": lambda x: torch.ones(6).untyped_storage().copy_(x.untyped_storage()),
    "storage cpu": lambda x: x.untyped_storage().cpu(),
    "storage repr": lambda x: (repr(x.untyped_storage()), repr(x.storage())),
    "storage fill": lambda x: x.untyped_storage().fill_(0),
    "storage byteswap": lambda x: x.untyped_storage().byteswap(torch.float32),

    "resize_": lambda x: (x.resize_(100).shape, x.sum().item()),
    "resize_ to nothing": lambda x: (x.resize_(0).shape, x.sum().item()),
    "resize_as_": lambda x: x.resize_as_(torch.ones(3, 7, device=x.device)).sum().item(),
    "as_strided beyond": lambda x: x.as_strided((100, 100), (1000, 1)).sum().item(),
    "view of dtype": lambda x: (x.view(torch.int16).shape, x.view(torch.uint8).sum().item()),
    "pin_memory": lambda x: x.pin_memory(),
    "is_pinned": lambda x: x.is_pinned(),
    "data set": lambda x: setattr(x, "data", torch.ones(3, device=x.device)),
    "data set to a host tensor": lambda x: setattr(x, "data", torch.ones(3)),
    "grad set": lambda x: setattr(x, "grad", torch.ones(2, 3, device=x.device)),
    "grad set to a host tensor": lambda x: setattr(x, "grad", torch.ones(2, 3)),
    "real set": lambda x: setattr(x, "real", 1.0),
    "names set": lambda x: setattr(x, "names", ("a", "b")),
    "requires_grad set": lambda x: setattr(x, "requires_grad", True),
    "class set": lambda x: setattr(x, "__class__", torch.nn.Parameter),
    "as_subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})) + 1,
    "make_subclass": lambda x: torch.Tensor._make_subclass(type("Sub2", (torch.Tensor,), {}), x) + 1,
    "wrapper_subclass": lambda x: torch.Tensor._make_wrapper_subclass(type("Sub3", (torch.Tensor,), {}), (2,)),
    "parameter": lambda x: torch.nn.Parameter(x) * 2,
    "buffer": lambda x: torch.nn.Buffer(x) * 2,
    "swap": lambda x: torch.utils.swap_tensors(x, torch.ones(2, device=x.device)),
    "tensor of tensor": lambda x: torch.tensor(x[0, 0]),
    "as_tensor": lambda x: (torch.as_tensor(x), torch.asarray(x, copy=True), torch.asarray(x, device="cpu")),
    "constructor": lambda x: torch.Tensor(x),
    "legacy constructor": lambda x: x.new(x),
    "legacy constructor of sizes": lambda x: x.new(2, 3).shape,
    "hash and set": lambda x: len({x, x}),
    "weak reference": lambda x: torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()).expired(),
    "repr of many": lambda x: (repr(x), str(x[0]), format(x[0, 0], ".2f"), repr([x])),
    "dir": lambda x: len(dir(x)),
    "vars": lambda x: sorted(vars(x)),
    "meta": lambda x: x.to("meta").shape,
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse_csr": lambda x: x.to_sparse_csr(),
    "to_mkldnn": lambda x: x.to_mkldnn(),
    "quantize": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "nested jagged": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    "complex views": lambda x: (torch.view_as_complex(x[:, :2].contiguous()).imag.add_(1), x.cfloat().conj().imag),
    "neg view": lambda x: torch._neg_view(x) + 1,
    "mapped file": _as_mapped_file,
    "functional tensor": lambda x: torch._to_functional_tensor(x),
    "from functional": lambda x: torch._from_functional_tensor(x),
    "inner tensor": lambda x: repr(torch._from_functional_tensor(x)),
    "inner tensor plus": lambda x: torch._from_functional_tensor(x) + 1,
    "inner tensor storage": lambda x: torch._from_functional_tensor(x).untyped_storage().nbytes(),
    "fake": lambda x: torch._subclasses.FakeTensorMode().from_tensor(x).shape,
    "dataloader collate": lambda x: torch.utils.data.default_collate([x, x]),
    "jit trace": lambda x: torch.jit.trace(lambda t: t + 1, x)(x),
    "backward hooks": lambda x: x.requires_grad_().register_hook(lambda g: g),
    "exported": lambda x: torch.export.export(torch.nn.Identity(), (x,)),
    "out of another dtype": lambda x: torch.add(x, 1, out=torch.empty(0, dtype=torch.float64, device=x.device)),
    "out on the host": lambda x: torch.add(x, 1, out=torch.empty(2, 3)),
    "host out": lambda x: torch.add(torch.ones(2, 3), 1, out=x),
    "stream": lambda x: x.record_stream(torch.Stream(device=x.device)),
    "event": lambda x: torch.Event(device=x.device).record(),
    "memory format": lambda x: x[None, None].to(memory_format=torch.channels_last).is_contiguous(),
    "empty with pinned memory": lambda x: torch.empty(2, pin_memory=True, device=x.device),
    "untyped storage on device": lambda x: torch.UntypedStorage(8, device=x.device),
    "typed storage on device": lambda x: torch.TypedStorage(8, dtype=torch.float32, device=x.device),
}  # fmt: skip


def _special(name: str) -> Call:
    return lambda device: SPECIAL[name](vector(device))


def _public(holder: Any) -> list[str]:
    return sorted(name for name in dir(holder) if not name.startswith("_") and name not in NOT_CALLED)


def calls() -> dict[str, Call]:
    """Every call by its name."""
    found: dict[str, Call] = {f"special {name}": _special(name) for name in SPECIAL}
    count = len(arguments(torch.device("cpu")))
    skipped = {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "__init__", "__del__"}
    for name in sorted(dir(torch.Tensor)):
        if name in skipped or name in NOT_CALLED:
            continue
        found[f"member {name}"] = _member(name)
        if callable(getattr(torch.Tensor, name, None)):
            found.update({f"method {name} {place}": _method(name, place) for place in range(count)})
    for module in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        for name in _public(module):
            if isinstance(getattr(module, name), types.BuiltinFunctionType | types.FunctionType):
                label = f"function {module.__name__}.{name}"
                found.update({f"{label} {place}": _function(module, name, place) for place in range(count)})
    for kind, holder in (("untyped", torch.UntypedStorage), ("typed", torch.TypedStorage)):
        for name in sorted({*dir(holder)} - skipped - RAW_POINTERS):
            for place in range(len(STORAGE_ARGUMENTS)):
                found[f"storage {kind}.{name} {place}"] = _storage(kind, name, place)
    return found


def touch(value: Any) -> None:
    """Use a result as a user would: look at it and read it."""
    for leaf in value if isinstance(value, tuple | list) else (value,):
        if isinstance(leaf, torch.Tensor):
            repr(leaf)
            leaf.cpu()


def attempt(call: Call, device: torch.device) -> str:
    """``value``, or the exception's name and text."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            touch(call(device))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "value"


def main(device_name: str, backend: str) -> None:
    """Make the calls named on standard input; say each name before, and what came of it after.

    Generated argument lists that the CPU refuses are not tried on the device.
    """
    faulthandler.enable()
    warnings.simplefilter("ignore")
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    device = torch.device(device_name)
    torch.set_num_threads(1)
    if device.type != "cpu":
        import torchport

        torchport.use(backend)
    known = calls()
    for name in json.loads(sys.stdin.read()):
        if device.type == "cpu" and name in KILLS_ON_THE_CPU:
            print(json.dumps(["end", name, "kills the CPU"]), file=report, flush=True)
            continue
        print(json.dumps(["begin", name]), file=report, flush=True)
        generated = name.startswith(("method", "function"))
        outcome = attempt(known[name], torch.device("cpu")) if generated else "value"
        if outcome == "value" and (device.type != "cpu" or not generated):
            outcome = attempt(known[name], device)
        elif outcome != "value":
            outcome = f"the CPU refuses: {outcome}"
        print(json.dumps(["end", name, outcome]), file=report, flush=True)
    report.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
