"""What ``explain`` adds for the ``port`` device: which of the ways to run an operator takes it there, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backend.decompositions import DECOMPOSE
from ..backend.random import is_random
from ..backend.registrar import resolve_operator
from ..core.config import config
from ..core.errors import TorchportError
from ..dispatch import BackendComponent
from ..frontend.device import copies, install, module
from ..run.device_runtime import runtimes

__all__ = ["component_of", "device_lines", "make_ready"]


def _runtime(device: str) -> Any:
    """The runtime of a ``port`` device string, or ``None`` for other devices and unbound indices."""
    import torch

    try:
        parsed = torch.device(device)
    except RuntimeError:
        return None
    if parsed.type != "port":
        return None
    module.init()
    try:
        return runtimes.get(parsed.index or 0)
    except TorchportError:
        return None


def make_ready(arguments: Sequence[Any]) -> None:
    """Have the device's kernels registered if one of the arguments names it: they are made on first use."""
    if any(str(a) == "port" or str(a).startswith("port:") for a in arguments if not hasattr(a, "shape")):
        module.init()


def component_of(device: str) -> BackendComponent | None:
    """The dispatcher's component of the backend behind a ``port`` device string."""
    runtime = _runtime(device)
    return None if runtime is None else runtime.kernels.component


def device_lines(op: str, device: str | None) -> Sequence[str]:
    """The ordered list that decides how an operator runs on a ``port`` device, with what holds for this one."""
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
    decomposed = "yes" if overload in runtime.capture.decompositions else "none in use"
    lines.append(f"  3. a decomposition of {backend} or core ATen: {decomposed}")
    boxed = "registered" if runtime.kernels.boxed else "none registered"
    lines.append(f"  4. {backend}'s boxed kernel, for results whose shape depends on data: {boxed}")
    lines.append(f"  5. the host, counted as {overload.name()}: {config.fallback}")
    return lines
