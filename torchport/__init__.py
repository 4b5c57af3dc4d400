"""torchport: one Python class for a compiler or an accelerator, and unmodified PyTorch programs run on it.

Importing torchport is light: public names are imported when they are first used, and engines when a backend is.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import aot, dispatch, runtime
    from .backend.execution import Computation
    from .backend.interface import (
        ArrayData,
        Backend,
        BackendData,
        BackendDevice,
        Capabilities,
        ExecutionContext,
        FreeableBuffer,
        InitContext,
        KernelRegistrar,
        Processed,
        Support,
        TensorData,
    )
    from .backend.lowering_context import Call, Lowering, LoweringContext, LoweringTable
    from .backend.normal_form import verify_graph
    from .backend.optional import (
        Chain,
        ChainCall,
        Started,
        SupportsBorrow,
        SupportsCacheKey,
        SupportsChain,
        SupportsCompilationDevices,
        SupportsCompilerSettings,
        SupportsFork,
        SupportsHostExecution,
        SupportsMemoryInfo,
        SupportsMethods,
        SupportsMetrics,
        SupportsOverlap,
        SupportsPreprocessAll,
        SupportsSeed,
        SupportsSharding,
        SupportsStart,
        SupportsSymbolicSizes,
        SupportsText,
    )
    from .backend.own_kernels import kernel
    from .backend.registry import BackendInfo, Registry, registry
    from .core import errors, metrics
    from .core.config import config
    from .core.errors import (
        AmbiguousKernel,
        BackendNotFound,
        BackendUnavailable,
        CacheMiss,
        CollectiveError,
        CompileError,
        ConfigError,
        ContractError,
        DelegateError,
        DeviceMismatch,
        DispatchError,
        ErrorCode,
        ExecutionError,
        GraphError,
        MethodError,
        MissingKernel,
        ProgramError,
        StorageAccess,
        TorchportError,
        UnsupportedOp,
    )
    from .core.specs import CompileSpec, CompileSpecs, TensorSpec
    from .core.traffic import Collective, collective_report, collectives
    from .debug.analysis import Finding, analyze, compile_reasons, tiers
    from .debug.dumps import dump, dump_trie
    from .debug.explain import explain
    from .frontend.device.api import (
        backend_data,
        device,
        donate,
        get_backend,
        list_backends,
        mark_dynamic,
        mode,
        register,
        sync,
        use,
    )
    from .frontend.spmd.mesh import mesh
    from .frontend.spmd.placing import shard, sharding_of
    from .run.reasons import CompileReason
    from .run.step_closures import step_closure
    from .run.tier_record import TierRecord
    from .run.warming import compiled, warm

_HOMES = {
    "torchport.backend.execution": "Computation",
    "torchport.backend.interface": (
        "ArrayData Backend BackendData BackendDevice Capabilities ExecutionContext FreeableBuffer InitContext "
        "KernelRegistrar Processed Support TensorData"
    ),
    "torchport.backend.lowering_context": "Call Lowering LoweringContext LoweringTable",
    "torchport.backend.normal_form": "verify_graph",
    "torchport.backend.optional": (
        "Chain ChainCall Started SupportsBorrow SupportsCacheKey SupportsChain SupportsCompilationDevices "
        "SupportsCompilerSettings SupportsFork SupportsHostExecution SupportsMemoryInfo SupportsMethods "
        "SupportsMetrics SupportsOverlap SupportsPreprocessAll SupportsSeed SupportsSharding SupportsStart "
        "SupportsSymbolicSizes SupportsText"
    ),
    "torchport.backend.own_kernels": "kernel",
    "torchport.backend.registry": "BackendInfo Registry registry",
    "torchport.core.config": "config",
    "torchport.core.errors": (
        "AmbiguousKernel BackendNotFound BackendUnavailable CacheMiss CollectiveError CompileError ConfigError "
        "ContractError DelegateError DeviceMismatch DispatchError ErrorCode ExecutionError GraphError MethodError "
        "MissingKernel ProgramError "
        "StorageAccess TorchportError UnsupportedOp"
    ),
    "torchport.core.specs": "CompileSpec CompileSpecs TensorSpec",
    "torchport.core.traffic": "Collective collective_report collectives",
    "torchport.debug.analysis": "Finding analyze compile_reasons tiers",
    "torchport.debug.dumps": "dump dump_trie",
    "torchport.debug.explain": "explain",
    "torchport.frontend.device.api": (
        "backend_data device donate get_backend list_backends mark_dynamic mode register sync use"
    ),
    "torchport.frontend.spmd.mesh": "mesh",
    "torchport.frontend.spmd.placing": "shard sharding_of",
    "torchport.run.step_closures": "step_closure",
    "torchport.run.reasons": "CompileReason",
    "torchport.run.tier_record": "TierRecord",
    "torchport.run.warming": "compiled warm",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {
    "aot": "torchport.aot",
    "dispatch": "torchport.dispatch",
    "errors": "torchport.core.errors",
    "metrics": "torchport.core.metrics",
    "runtime": "torchport.runtime",
}

__all__ = [*sorted(_HOME_OF), *sorted(_MODULES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'torchport' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _autoload() -> None:
    """Called by ``import torch`` (:mod:`torchport_autoload`); must never make that import fail."""
    try:
        from .frontend.register import register_frontends  # on demand: importing torchport imports nothing else

        register_frontends()
    except Exception as error:
        # Not a warning: where warnings are errors, it would break the very import it must not break.
        print(f"torchport: torch.device('port') is not available: {type(error).__name__}: {error}", file=sys.stderr)


if getattr(sys.modules.get("torchport_autoload"), "stood_back", ""):
    _autoload()  # ``import torch`` left that to a program that imports this
