"""All changes to objects of PyTorch and of libraries that use it: one table, and one function that makes the changes.

A row of :data:`PATCHES` says what is changed, what the change does and why; :func:`replace` puts the new object
in place. It refuses an object that is not in the table or has been replaced already. Changes that last only while
PyTorch's compilers work on a graph are in :data:`WHILE_COMPILING`. Registrations for which PyTorch has an interface (a
device module, hooks, kernels) are in :data:`ADDITIONS`. ``torchport doctor`` prints all three. A module that is not
imported yet is changed at its import (:func:`when_imported`). Runs inside ``import torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from ...core.releases import SINCE, UNTIL, has

__all__ = ["ADDITIONS", "PATCHES", "WHILE_COMPILING", "is_applied", "replace", "replaced", "when_imported"]


_IMPORT: Final = "import torch"
_USE: Final = "first use"
_LATER: Final = "its import, after first use"
_ALLOCATOR: Final = "PyTorch asks a C++ allocator, which a device in Python has none of, and ends in an assertion"
_PICK: Final = "PyTorch takes the accelerator where a program names no device, and needs of it what this one lacks"
_MEMORY: Final = "a tensor of the device has no memory in this process; reading it would end the process"
_QUESTIONS: Final = (
    "programs ask for memory to learn what is shared and how large it is; PyTorch has no answer for none"
)
_METHODS: Final = "PyTorch makes these for a device"
_LIGHTNING: Final = (
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector",
    "lightning.fabric.connector._Connector",
    "lightning_fabric.connector._Connector",
)
_NAMES: Final = "PyTorch's own enumerations name the device"

PATCHES: Final[dict[str, tuple[str, str, str]]] = {
    "torch.accelerator.current_device_index": (
        "asks the device module, which makes nothing ready",
        _ALLOCATOR,
        _IMPORT,
    ),
    "torch.accelerator.current_stream": (
        "answers without making the device ready",
        "Dynamo asks for it in every function",
        _IMPORT,
    ),
    "torch._dynamo.utils.get_current_stream": (
        "the same",
        "functions that Dynamo has compiled ask for it",
        "its import",
    ),
    "torch.accelerator.set_device_idx": ("sets the device module's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.set_device_index": ("sets the device module's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.synchronize": ("waits for the device, if it is in use", _ALLOCATOR, _IMPORT),
    "torch.accelerator.device_index.__enter__": ("sets the device module's index", _ALLOCATOR, _IMPORT),
    "torch.accelerator.device_index.__exit__": ("leaves the index as it is", _ALLOCATOR, _IMPORT),
    "torch.accelerator.empty_cache": ("empties the device's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.empty_cache": ("empties the device's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.empty_host_cache": ("empties the device's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.empty_host_cache": ("empties the device's", _ALLOCATOR, _IMPORT),
    "torch.accelerator.get_memory_info": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.get_memory_info": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.max_memory_allocated": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.max_memory_allocated": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.max_memory_reserved": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.max_memory_reserved": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory_allocated": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.memory_allocated": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory_reserved": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.memory_reserved": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory_stats": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.memory_stats": ("answers from the device's own figures", _ALLOCATOR, _IMPORT),
    "torch.accelerator.reset_accumulated_memory_stats": ("does nothing: there are none", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.reset_accumulated_memory_stats": ("does nothing: there are none", _ALLOCATOR, _IMPORT),
    "torch.accelerator.reset_peak_memory_stats": ("does nothing: there are none", _ALLOCATOR, _IMPORT),
    "torch.accelerator.memory.reset_peak_memory_stats": ("does nothing: there are none", _ALLOCATOR, _IMPORT),
    "torch.Tensor.pin_memory": (
        "gives a copy that is noted as pinned; raises StorageAccess for a tensor of the device",
        "DataLoader(pin_memory=True) asks the accelerator for an allocator, which this one has none of",
        _IMPORT,
    ),
    "torch.Tensor.is_pinned": ("knows what pin_memory noted", "the same", _IMPORT),
    "torch.nn.Module._apply": (
        "keeps the Parameter objects when a module comes to the device or leaves it",
        "new ones would untie tied weights and orphan an optimizer made before",
        _IMPORT,
    ),
    "torch.Tensor.data": (
        "takes what is on the device for a tensor of the CPU, and the other way round; the object stays",
        "PyTorch refuses it, since their insides are of different kinds",
        _IMPORT,
    ),
    "torch.Generator": (
        "makes generators of the device, too",
        "PyTorch asks C++ for a device's generators; all of its own are instances of the class as before",
        _IMPORT,
    ),
    "torch.UntypedStorage.__new__": ("raises StorageAccess for a storage on the device", _ALLOCATOR, _IMPORT),
    "torch.nn.parallel.data_parallel._get_available_device_type": (
        "DataParallel calls its module as it is",
        _PICK,
        _IMPORT,
    ),
    "torch.nn.attention.flex_attention.create_block_mask": (
        "makes the mask on the CPU unless it is told a device",
        _PICK,
        "its import",
    ),
    "torch.distributed.distributed_c10d.BackendConfig.__init__": (
        "takes the backends of both the CPU and the device where none is named",
        "PyTorch takes the accelerator's alone; objects and checkpoints travel as tensors of the CPU",
        "its import",
    ),
    "torch.distributed.rendezvous._create_c10d_store": (
        "gives processes that torchrun starts again keys of their own",
        "the keys of those that have ended are still in the agent's store, and gloo would connect to them",
        "its import",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_init.init_device_mesh": (
        "spreads over CPUs where the program has not used the device, or its process group does not take tensors of it",
        _PICK,
        "its import",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.alloc_storage": (
        "gives a freed tensor of the device a value",
        "it resizes a storage",
        "its import",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.free_storage": (
        "lets go of the value of a tensor of the device",
        "the same",
        "its import",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param": (
        "takes the parameter's data anew, for the device",
        "it asks whether two tensors share one",
        "its import",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors": (
        "divides sums by a factor that the program sets",
        "no kernel is told the factor of PREMUL_SUM",
        "its import",
    ),
    "torch.distributed.tensor._api.distribute_tensor": (
        "takes a mesh of torchport.mesh, too",
        "PyTorch's own has a process per device",
        "its import",
    ),
    "torch.distributed.tensor.parallel.api.parallelize_module": ("the same", "the same", "its import"),
    "torch.distributed.fsdp._fully_shard._fully_shard.fully_shard": ("the same", "the same", "its import"),
    "torch.distributed.Reducer.__init__": (
        "keeps the note of used parameters of the device on the CPU",
        "it would go through pinned memory; " + _ALLOCATOR,
        "first process group",
    ),
    "torch.distributed.Reducer._set_static_graph": ("the same", "the same", "first process group"),
    "torch.nn.parallel.distributed._get_device_index": (
        "DDP takes the process's own number for where the module lies",
        "PyTorch's DDP moves inputs to device_ids[0], with streams of its own",
        "first process group",
    ),
    "torch.distributed.run.determine_local_world_size": (
        "--nproc-per-node=auto starts a process per core",
        _PICK,
        "its import",
    ),
    "torch._C._has_storage": ("False for the device", "deepcopy and pickling would clone a storage", _USE),
    "torch._tensor_str._str_intern": (
        "formats a tensor of the device from a host copy",
        "it reads many small values, each a computation of its own",
        _USE,
    ),
    "torch.Tensor._reduce_ex_internal": (
        "saves a tensor of the device as CUDA's are saved",
        "such a file loads with any map_location, also without torchport",
        _USE,
    ),
    "torch.Tensor.untyped_storage": (
        "gives a DeviceStorage, which has an identity, a size and an address, and no contents",
        _QUESTIONS,
        _USE,
    ),
    "torch.Tensor.data_ptr": ("counts from the address of a DeviceStorage", _QUESTIONS, _USE),
    "torch.Tensor.storage_offset": (
        "knows where a view begins in its base",
        "each tensor of the device is a value of its own underneath, which begins at 0",
        _USE,
    ),
    "torch.Tensor.__dlpack__": ("hands out a host copy", _MEMORY, _USE),
    "torch.Tensor.__dlpack_device__": ("is the host, for a tensor of the device", "the same", _USE),
    "torch.utils.dlpack.to_dlpack": ("hands out a host copy", _MEMORY, _USE),
    "torch.utils.checkpoint.get_device_states": (
        "asks the device's indices for their generators' states",
        "PyTorch makes each device current first, which index 0 alone can be",
        _USE,
    ),
    "torch.utils.checkpoint.set_device_states": ("sets them the same way", "the same", _USE),
    "torch._C._select_conv_backend": (
        "names the host's kernel for a convolution on the device",
        "it knows the kernels of its own devices only; PyTorch's own tests ask",
        _USE,
    ),
    "torch._C._set_default_dtype": (
        "has traces begin anew where the default changes",
        "what a trace has seen holds for one default dtype",
        _USE,
    ),
    "torch._C._set_default_tensor_type": ("the same", "the same", _USE),
    "torch.autograd._engine_run_backward": (
        "runs backward on the calling thread, and says why it fails on another accelerator",
        "backward goes on with the trace of the forward, which is the calling thread's; PyTorch has one accelerator",
        _USE,
    ),
    "torch.autograd.graph._engine_run_backward": ("the same", "the same", _USE),
    "torch._functorch.eager_transforms._grad_increment_nesting": (
        "inside of the transform views are differentiated by taking them again",
        "PyTorch goes by their place in memory, which they have none of",
        _USE,
    ),
    "torch._functorch.eager_transforms._grad_decrement_nesting": ("ends that", "the same", _USE),
    "torch._functorch.eager_transforms._jvp_increment_nesting": ("begins it, too", "the same", _USE),
    "torch._functorch.eager_transforms._jvp_decrement_nesting": ("ends it", "the same", _USE),
    "torch.Tensor._make_wrapper_subclass": (
        "gives a wrapper around tensors of the device a dispatch key above functionalization",
        "functionalization would take the tensor in it apart and wrap the wrapper",
        _USE,
    ),
    "*.__torch_dispatch__": (
        "of a subclass with tensors of the device: runs with functionalization on",
        "its code would see handles instead of the user's tensors",
        "first tensor of the class",
    ),
    "torch._library.custom_ops.CustomOpDef.register_kernel": (
        "takes a custom operator over as soon as it has a body",
        "PyTorch runs the body on handles, where writes to views are lost",
        _USE,
    ),
    "torch.library.Library.impl": (
        "takes another library's composite over as soon as it has a body",
        "PyTorch runs the body on handles, and gives it shallow copies of those that it makes there",
        _USE,
    ),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        "does not tell of kernels for custom operators before functionalization",
        "PyTorch's compilers make an operator functional only if nobody registered how",
        _USE,
    ),
    "torch._subclasses.functional_tensor.CppFunctionalizeAPI.wrap_tensors": (
        "wraps a handle as every tensor of the device is wrapped",
        "results of torch.cond and while_loop would be taken for tensors of a transformation",
        _USE,
    ),
    "torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor": (
        "describes a tensor of the device as the user sees it",
        "it takes functionalization's wrappers apart, which each tensor of the device is in",
        _USE,
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const": (
        "False for the device",
        "a fake tensor of one element would carry the real one, to compute with while tracing",
        _USE,
    ),
    "torch._subclasses.fake_tensor.FakeTensorConverter.invalidate_constant_aliases": (
        "nothing for the device",
        "the same",
        _USE,
    ),
    "torch.multiprocessing.reductions.StorageWeakRef.__copy__": (
        "gives the reference itself",
        "a copy would give back a reference that it does not have; the memory may be another's by then",
        _USE,
    ),
    "torch.multiprocessing.reductions.StorageWeakRef.__deepcopy__": (
        "gives the reference itself",
        "the same: deepcopy of a fake tensor copies its mode, which holds such references",
        _USE,
    ),
    "torch._functorch._aot_autograd.runtime_wrappers.HANDLED_TYPES": (
        "holds the classes of handles",
        "AOTAutograd watches a compiled function's first call and lets no operator on other classes pass",
        "first compilation",
    ),
    "torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs": (
        "keeps nodes that nothing uses",
        "a write to a float64 input without dimensions would be removed with the input's number",
        "first compilation",
    ),
    "accelerate.state.PartialState.__init__": (
        "warns, once, where it picks the CPU",
        "its list of devices is closed",
        _LATER,
    ),
    **dict.fromkeys(
        (f"{connector}._choose_auto_accelerator" for connector in _LIGHTNING),
        ("warns, once, where it picks the CPU", "its list of devices is closed", _LATER),
    ),
    **dict.fromkeys(
        (f"{connector}._choose_strategy" for connector in _LIGHTNING),
        (
            "takes the device for accelerator='port'",
            "of an accelerator that is not on its list, it takes the CPU",
            "its import",
        ),
    ),
    "torch.multiprocessing.reductions.reduce_tensor": (
        "sends a tensor of the device as a host copy, which the other process moves",
        _MEMORY,
        _LATER,
    ),
    "torch.utils.data._utils.collate.collate_tensor_fn": (
        "stacks tensors of the device on it, also in a worker",
        "a worker's batches are made in memory that processes share",
        _LATER,
    ),
    "safetensors.safe_open": (
        "reads on the CPU and moves what is asked for",
        "its list of devices is closed",
        "its import",
    ),
    "safetensors.torch.safe_open": ("the same", "the same", "its import"),
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor": (
        "copies a tensor of the device as a tensor",
        "it copies storages, and a storage of the device has no contents",
        _LATER,
    ),
}
"""What :func:`replace` may change (``*``: any class), and for each what the change does, why, and when it is made."""
for _name in (*SINCE, *UNTIL):
    if not has(_name):
        del PATCHES[_name]

ADDITIONS: Final[dict[str, tuple[str, str, str]]] = {
    "torch.port.*": ("the device module", "torch.get_device_module and programs ask it", _IMPORT),
    "torch.Tensor.port": ("moves to the device", _METHODS, _IMPORT),
    "torch.Tensor.is_port": ("whether a tensor is on the device", _METHODS, _IMPORT),
    "torch.nn.Module.port": ("moves to the device", _METHODS, _IMPORT),
    "torch.nn.utils.rnn.PackedSequence.port": ("moves to the device", _METHODS, _IMPORT),
    "torch.nn.utils.rnn.PackedSequence.is_port": ("whether it is on the device", _METHODS, _IMPORT),
    "torch._C._autograd.DeviceType.*": ("PORT", _NAMES, _IMPORT),
    "torch._C._profiler.ProfilerActivity.*": ("PORT", _NAMES, _IMPORT),
    "PrivateUse1": ("its name, hooks and device guard", "the key that PyTorch has for such devices", _IMPORT),
    "torch.distributed.distributed_c10d.Backend.*": (
        "a backend, port",
        "torch.distributed has a way of its own to register one",
        "its import",
    ),
    "torch.distributed.distributed_c10d.Backend._plugins": (
        "the fake backend's creator registers the kernels of collectives first, and takes tensors of the device",
        "PyTorch names the devices that it is for",
        "its import",
    ),
    "torch.library, c10d, _c10d_functional and fsdp": (
        "kernels of collectives and of what fully_shard copies with, at PrivateUse1 and Functionalize",
        "they carry tensors of the device; others go to PyTorch's kernels",
        "first process group",
    ),
    "torch.library, aten::batch_norm_stats and its kin": (
        "kernels of what SyncBatchNorm is written with, at Functionalize",
        "PyTorch has them for CUDA alone",
        "first process group",
    ),
    "torch.library, aten at PythonTLSSnapshot, and fused Adam with a rate in a tensor at Meta": (
        "kernels that take plain tensors beside DTensors as replicated, and say that the optimizer gives nothing",
        "see frontend.distributed.mixed",
        "first process group",
    ),
    "torch.optim.optimizer._global_optimizer_pre_hooks": ("a hook", "see twins.own_gradients", _IMPORT),
    "torch.optim.optimizer._global_optimizer_post_hooks": ("a hook", "a training step ends", _IMPORT),
    "lightning.pytorch.accelerators.AcceleratorRegistry, and Fabric's": (
        "an accelerator, port",
        "Lightning has no way for packages to tell of one",
        "its import",
    ),
    "torch.serialization._package_registry": ("a package", "files name storages of the device", _IMPORT),
    "sys.meta_path": ("a finder that finds nothing", "tells of the imports that rows above wait for", _IMPORT),
    "multiprocessing.reduction.ForkingPickler": (
        "a reducer of tensors",
        "see torch.multiprocessing.reductions.reduce_tensor",
        _LATER,
    ),
    "torch.utils.data._utils.collate.default_collate_fn_map": (
        "the function for tensors",
        "see torch.utils.data._utils.collate.collate_tensor_fn",
        _LATER,
    ),
    "torch.library, PrivateUse1 and AutocastPrivateUse1": (
        "kernels of every functional ATen operator",
        "what the device is",
        _USE,
    ),
    "torch.library, Functionalize and AutogradPrivateUse1": (
        "kernels of composites, of what writes in place, and of operators that count in memory",
        "views and writes of tensors without memory; other devices' tensors go to PyTorch's kernels",
        _USE,
    ),
    "torch.library, TESTING_ONLY_GenericWrapper": (
        "kernels that pass operators on without functionalization",
        "see torch.Tensor._make_wrapper_subclass",
        "first tensor of a subclass",
    ),
    "torch._dynamo.trace_rules": ("torchport is skipped", "Dynamo would compile torchport", "first compilation"),
}
"""Registrations through interfaces of PyTorch and other libraries: what, why, and when."""

_COMPILING: Final = "while a graph is compiled"
_BASES: Final = "torch._functorch._aot_autograd"

WHILE_COMPILING: Final[dict[str, tuple[str, str, str]]] = {
    "torch._subclasses.functional_tensor.FunctionalTensorMode.__torch_dispatch__": (
        "writes through expanded views pick the elements that differ",
        "PyTorch adds up differences: inf - inf is NaN, and bools cannot be subtracted",
        _COMPILING,
    ),
    f"{_BASES}.input_output_analysis.compute_overlapping_tensors": (
        "finds rows of matrices that overlap, too",
        "inputs that share memory would be taken for separate ones, and a write to one would not reach the other",
        _COMPILING,
    ),
    f"{_BASES}.graph_capture.create_functionalized_fn": (
        "is told that written inputs come last",
        "a result that is a written input would have its value from before the write",
        _COMPILING,
    ),
    f"{_BASES}.runtime_wrappers.create_synthetic_base_metadata": (
        "inputs with one base keep their own tangents; conjugate views of one base are refused",
        "gradients of inputs that share memory would be those of their base",
        _COMPILING,
    ),
    f"{_BASES}.runtime_wrappers.make_output_handler": (
        "before 2.13: what makes such results holds on to the function of the row below",
        "it would look the function up when it is called",
        _COMPILING,
    ),
    f"{_BASES}.runtime_wrappers.gen_alias_from_base": (
        "a result that shows an input is made by the graph's own views",
        "PyTorch makes it by as_strided, which the device has no memory for",
        _COMPILING,
    ),
}
"""Changes that last only while a graph is compiled, under Dynamo's lock."""

_applied: Final[set[str]] = set()


def replace(target: str, new: Any, owner: Any = None) -> None:
    """Replace the object that a row of :data:`PATCHES` names.

    ``owner``: the class, for a target with ``*``. The module must have been imported. Raises ``KeyError`` for a target
    that is not in the table, and ``RuntimeError`` for one that has been replaced already.
    """
    if target not in PATCHES:
        raise KeyError(target)
    path, _, name = target.rpartition(".")
    if owner is None and target in _applied:
        raise RuntimeError(f"{target} is replaced twice: one wrapper should do both things")
    setattr(_find(path) if owner is None else owner, name, new)
    _applied.add(target)


@contextmanager
def replaced(target: str, new: Any) -> Iterator[None]:
    """An object of :data:`WHILE_COMPILING`, replaced while the ``with`` lasts. Raises ``KeyError`` for any other."""
    if target not in WHILE_COMPILING:
        raise KeyError(target)
    path, _, name = target.rpartition(".")
    owner = _find(path)
    before = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _find(path: str) -> Any:
    """The module or object at a path; the module where a function has the same path, as with ``data_parallel``."""
    module, names = path, list[str]()
    while module not in sys.modules:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    found: Any = sys.modules[module]
    for name in names:
        found = getattr(found, name)
    return found


def is_applied(target: str) -> bool:
    """Whether an object of the table has been changed in this process."""
    return target in _applied


# -- modules that are not imported yet -------------------------------------------------------------------------------
_UNDER_WAY = "_initializing"
"""What importlib notes on a module's spec while the module runs."""
_Change = Callable[[Any], None]


def when_imported(name: str, change: _Change) -> None:
    """Call ``change(module)`` once the module of that name has been imported: now, if it is imported already.

    For a module whose import is still under way nothing happens, since no code can be put behind an import that has
    begun. The next call of this function after the import changes the module.
    """
    module = sys.modules.get(name)
    if module is None:
        _finder.changes.setdefault(name, []).append(change)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    elif not getattr(module.__spec__, _UNDER_WAY, False):
        change(module)


class _Finder:
    """A finder that asks the other finders for a module, and has the module's loader make the changes afterwards."""

    def __init__(self) -> None:
        self.changes: dict[str, list[_Change]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                self._put_behind(spec, name)
                return spec
        return None

    def _put_behind(self, spec: ModuleSpec, name: str) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as before, so a reload makes no changes
            execute(module)
            for change in self.changes.pop(name, []):
                change(module)

        loader.exec_module = exec_module


_finder = _Finder()
