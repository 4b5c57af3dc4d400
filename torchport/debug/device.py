"""What ``explain`` adds for the ``port`` device: which of the ways to run an operator takes it there, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..backend.builder import GraphBuilder, Refused
from ..backend.decompositions import DECOMPOSE
from ..backend.infer import DataDependent, Inferred, NoShapeRule, infer_as_on_cpu, infer_example
from ..backend.lowering import view_form
from ..backend.own_kernels import resolve_operator
from ..backend.random import RANDOM, is_random
from ..backend.registry import registry
from ..core.config import config
from ..core.errors import TorchportError
from ..core.specs import TensorSpec
from ..dispatch import BackendComponent
from ..frontend.device import api, copies, install, module
from ..run.device_runtime import runtimes

__all__ = ["component_of", "device_lines", "make_ready", "port_device"]


def _runtime(device: str) -> Any:
    """The runtime of a ``port`` device string, or ``None`` for other devices and unbound indices."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        return None
    if parsed.type != "port":
        return None
    module.init()
    if not parsed.index:
        return runtimes.get(0)  # a default backend that is not there is an error
    try:
        return runtimes.get(parsed.index)
    except TorchportError:
        return None


def make_ready(arguments: Sequence[Any]) -> None:
    """Have the device's kernels registered if one of the arguments names it: they are made on first use."""
    if any(str(a) == "port" or str(a).startswith("port:") for a in arguments if not hasattr(a, "shape")):
        module.init()


def port_device(name: str) -> str:
    """The ``port`` device of a backend, for its name; any other text as it is. Raises :class:`BackendUnavailable`."""
    return str(api.device(name)) if name in registry.names() else name


def component_of(device: str) -> BackendComponent | None:
    """The dispatcher's component of the backend behind a ``port`` device string."""
    runtime = _runtime(device)
    return None if runtime is None else runtime.kernels.component


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The device of the first ``port`` tensor among arguments."""
    leaves = tree_leaves((args, kwargs))
    return next((str(v.device) for v in leaves if isinstance(v, torch.Tensor) and v.device.type == "port"), None)


def device_lines(
    op: str, device: str | None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Sequence[str]:
    """The ordered list that decides how an operator runs on a ``port`` device, with what holds for this one.

    ``args``, ``kwargs``: those of a call; without, the backend is asked about float32 matrices.
    """
    if device is None:
        device = _device_of(args, kwargs or {})
        given = [(args, kwargs or {})]
    else:
        given = None
    runtime = None if device is None else _runtime(device)
    if runtime is None:
        return ()
    overload = resolve_operator(op)
    backend = runtime.backend.name
    own = runtime.kernels.kernel(overload)
    lines = [f"on port:{runtime.index} ({backend} on {runtime.device}), in this order:"]
    lines.append(f"  1. a Dense kernel of {backend}: " + ("registered; it runs at once" if own else "none registered"))
    if overload in copies.special_kernels():
        lines.append("  2. capture: no, it moves data or returns a Python value, and has a kernel of the device's own")
    elif overload not in install.kernels:
        lines.append("  2. capture: no, PyTorch takes it apart, or functionalizes it, above the device")
    else:
        how = "as integer arithmetic on the generator's key" if is_random(overload) else "as it is"
        how = "by the device's decomposition" if overload in DECOMPOSE else how
        limit = "" if runtime.capture.takes_all else f", where {backend}.supports() says yes"
        lines.append(f"  2. capture into the graph: {how}{limit}")
        lines += _asked(runtime, overload, given)
    decomposed = "yes" if overload in runtime.capture.decompositions else "none in use"
    lines.append(f"  3. a decomposition of {backend} or core ATen: {decomposed}")
    boxed = "registered" if runtime.kernels.boxed else "none registered"
    lines.append(f"  4. {backend}'s boxed kernel, for results whose shape depends on data: {boxed}")
    lines.append(f"  5. the host, counted as {overload.name()}: {config.fallback}")
    return lines


# -- asking the backend ------------------------------------------------------------------------------------------------
def _asked(runtime: Any, op: Any, given: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] | None) -> list[str]:
    """What the backend says about a call, down to the operator inside that it refuses."""
    if runtime.capture.takes_all:
        return []
    for args, kwargs in _examples(op) if given is None else given:
        specs, named = tree_map(_spec, (list(args), dict(kwargs)))
        # An example may be none that the CPU's kernel can run, and few kernels check what they are given.
        how = infer_example if given is None else infer_as_on_cpu
        try:
            reason = _refusal(runtime, op, how, specs, named)
        except (DataDependent, NoShapeRule) as error:
            return [f"     {error}"]
        except Exception:  # whatever a shape rule raises that checks nothing
            continue  # the example was none
        shown = ", ".join(str(leaf) for leaf in specs if isinstance(leaf, TensorSpec)) or "these arguments"
        return [f"     for {shown}: " + ("yes" if reason is None else f"no; {reason}")]
    return []


def _spec(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value


def _refusal(
    runtime: Any, op: Any, how: Callable[..., Inferred], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why the backend does not take a call in any form; names the operator inside that it does not take.

    ``how`` infers what the call gives.
    """
    inferred = how(DECOMPOSE.get(op) or view_form(op), args, kwargs)
    builder = GraphBuilder(runtime.capture, strict=True)
    number = itertools.count()

    def node(value: Any) -> Any:
        return builder.placeholder(f"arg{next(number)}", value) if isinstance(value, TensorSpec) else value

    nodes, named = tree_map(node, (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, TensorSpec))
    try:
        if is_random(op):
            key = builder.placeholder("key", TensorSpec((), torch.int64, ()))
            RANDOM[op](builder, key, inferred.specs[0], *nodes, **named)
        else:
            builder.lower(op, inferred.specs, nodes, named)
    except Refused as refused:
        return refused.reason
    return None


_SIZES: Final[Sequence[Any]] = ([4], [0], [4, 4], [1])
"""What is tried where an operator takes a list of sizes or dimensions."""


def _examples(op: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments that the operator may take: matrices, and the smallest numbers."""
    matrix = TensorSpec((4, 4), torch.float32, (4, 1))
    for sizes in _SIZES:
        plain: dict[str, Any] = {
            "Tensor": matrix, "List[Tensor]": [matrix, matrix], "int": 0, "SymInt": 0, "float": 0.5, "number": 1,
            "bool": False, "List[bool]": [True, True, True], "ScalarType": torch.float32, "List[int]": sizes,
            "List[SymInt]": sizes,
        }  # fmt: skip
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in op._schema.arguments:
            if not argument.has_default_value():
                value = plain.get(str(argument.real_type))
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
        yield args, kwargs
