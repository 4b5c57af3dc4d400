"""Writes that the CPU refuses: in-place operators and ``out=`` are tried on CPU tensors of the same layout in memory.

PyTorch's functionalization turns a write into an operator that gives a new value. The CPU's kernels check the written
tensor: whether its dtype can hold the result, whether its elements share memory, whether it overlaps in part with an
argument that is read. Functionalization drops these checks, so the CPU's operator itself is run, once per kind of
arguments.

Private torch APIs used here: ``torch._C._functionalization.get_view_meta_sequence`` (what a wrapper is a view of),
``torch._is_functional_tensor``, ``torch._C._is_alias_of``.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...backend.probe import PlacedSpec, cpu_result
from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...core.specs import TensorSpec, is_dense
from ...trace.handle import LazyTensor
from ...trace.wrapping import inner_of
from .expanded import call_exactly, is_of_expanded, write_back
from .opaque import opaque
from .places import holders_of_storage, place
from .registered import names_with_kernel

__all__ = ["Checked", "boxable", "install", "is_conjugate_view", "refuse_as_cpu", "share_memory"]

_views: Final[Any] = torch._C._functionalization  # type: ignore[attr-defined]
_is_functional = torch._is_functional_tensor
_is_alias_of: Final[Callable[[torch.Tensor, torch.Tensor], bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Compares storages in C++: Python objects of them would count as views, and ``resize_`` enlarges no viewed memory."""


def share_memory(one: Any, other: Any) -> bool:
    """Whether an argument shares memory with a tensor of this device."""
    return isinstance(other, torch.Tensor) and _is_functional(other) and _is_alias_of(one, other)


def is_conjugate_view(tensor: torch.Tensor) -> bool:
    """Whether a complex tensor of this device is a conjugate view, which a CPU tensor says by ``is_conj()``."""
    made_by = _views.get_view_meta_sequence(tensor)
    return tensor.is_complex() and sum(isinstance(meta, _views._conj_ViewMeta) for meta in made_by) % 2 == 1


def _described(values: Any) -> Any:
    """The arguments with a spec for each tensor of this device; one spec object stands for one tensor."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and _is_functional(value)]
    specs: dict[int, TensorSpec] = {}
    for tensor in tensors:
        if id(tensor) in specs:
            continue
        spec = TensorSpec.of(tensor)
        if any(other is not tensor and _is_alias_of(tensor, other) for other in tensors):
            root, placed = place(tensor)
            # A conjugate view is resolved where it is read, so it shares no place with its base.
            resolved = placed.is_conj() or placed.is_neg()
            if placed.shape == tensor.shape and placed.dtype == tensor.dtype and not resolved:
                # A write through a view may change its base's strides in dimensions of one element, which mean nothing.
                strides = tuple(step if n > 1 else 1 for n, step in zip(spec.shape, placed.stride(), strict=True))
                spec = PlacedSpec(spec.shape, spec.dtype, strides, root, int(placed.storage_offset()))
        specs[id(tensor)] = spec
    return tree_map(lambda value: specs.get(id(value), value) if isinstance(value, torch.Tensor) else value, values)


_accepted: Final[OrderedDict[Any, Any]] = OrderedDict()
_REMEMBER: Final = 4096


def _key(described: Any, places: dict[int, int]) -> Any:
    """A hashable form of described arguments, where identity is the order of appearance."""
    if isinstance(described, (list, tuple)):
        return tuple(_key(item, places) for item in described)
    if isinstance(described, dict):
        return tuple((name, _key(value, places)) for name, value in described.items())
    if isinstance(described, PlacedSpec):
        spec = (described.shape, described.dtype, described.strides, described.offset)
        return (spec, places.setdefault(described.memory, len(places)), places.setdefault(id(described), len(places)))
    if isinstance(described, TensorSpec):
        return (described, places.setdefault(id(described), len(places)))
    if isinstance(described, torch.Tensor):
        return (described.dtype, tuple(described.shape), described.item() if described.numel() == 1 else id(described))
    return (described.__class__, repr(described))


def refuse_as_cpu(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Raise what the CPU raises for a write with such arguments.

    Returns the shapes of the CPU kernel's results; ``None`` where the kernel was not run.
    """
    described: Any = _described((list(args), dict(kwargs)))
    key = (op, torch.get_default_dtype(), _key(described, {}))
    if key in _accepted:
        return _accepted[key]
    try:
        found = cpu_result(op, *described)
    except Exception as error:
        error.add_note(f"torchport: called at {user_line()}")
        raise
    shapes = None if found is None else [tuple(value.shape) for value in tree_leaves(found)]
    _accepted[key] = shapes
    if len(_accepted) > _REMEMBER:
        _accepted.popitem(last=False)
    return shapes


def boxable(op: Any, args: Sequence[Any], first: int = 0) -> Sequence[Any]:
    """Arguments from position ``first`` on, for PyTorch's kernel: Python numbers in tensors' places become tensors."""
    for at in _tensor_places(op):
        place = at - first
        if 0 <= place < len(args) and isinstance(args[place], (int, float, complex)):
            args = [*args[:place], torch.tensor(args[place]), *args[place + 1 :]]
    return args


@functools.cache
def _tensor_places(op: Any) -> list[int]:
    """Which arguments are tensors."""
    return [at for at, argument in enumerate(op._schema.arguments) if str(argument.real_type) == "Tensor"]


# -- out= --------------------------------------------------------------------------------------------------------------
class Checked(NamedTuple):
    """An operator with ``out=`` whose calls are checked, how many it writes, and PyTorch's own kernel of it."""

    op: Any
    outs: int
    original: Any


def install(library: torch.library.Library) -> list[Checked]:
    """Register kernels that check operators with ``out=``, in place of functionalization's kernels.

    Also ``resolve_conj``, which copies a conjugate view, so that a write to the result does not reach the view.
    """
    library.impl("resolve_conj", opaque(_resolve_conj), "AutogradPrivateUse1")
    installed: list[Checked] = []
    for name in names_with_kernel("Functionalize"):
        short, _, overload = name.partition(".")
        # A schema of its own: ``torch.ops`` would keep an object for each of two thousand operators.
        outs = [argument for argument in torch._C._get_schema(short, overload).arguments if argument.is_out]
        if outs and all(str(argument.real_type) == "Tensor" for argument in outs):
            op = getattr(getattr(torch.ops.aten, short.removeprefix("aten::")), overload or "default")
            original = torch.library.get_kernel(name, "Functionalize")
            fn = opaque(_checked(op, [argument.name for argument in outs], original))
            library.impl(name.removeprefix("aten::"), fn, "Functionalize", with_keyset=True, allow_override=True)
            installed.append(Checked(op, len(outs), original))
    return installed


def _resolve_conj(self: torch.Tensor) -> torch.Tensor:
    ours = self.is_complex() and _is_functional(self)
    return self.clone() if ours and is_conjugate_view(self) else self


def _checked(op: Any, outs: Sequence[str], original: Any) -> Callable[..., Any]:
    """The kernel that checks an operator. ``native/outs.h`` has its twin, which calls it for a call of a new kind."""
    known: set[Any] = set()
    run = original.call_boxed
    only, default_dtype = outs[0] if len(outs) == 1 else None, torch.get_default_dtype

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        written: list[Any] = [kwargs.get(name) for name in outs] if only is None else [kwargs.get(only)]
        signature: list[Any] | None = [default_dtype()]
        for value in (*args, *kwargs.values()):
            if value.__class__ in _PLAIN:
                signature += (value.__class__, value)
            elif not _describe(value, written, signature):
                signature = None
                break
        kind = None
        try:
            if signature is not None:
                kind = tuple(signature)
                if kind in known:
                    return run(keys, *boxable(op, args), **kwargs)
        except TypeError:
            kind = None  # symbolic sizes have no hash
        if all(map(_is_ours, written)):
            shapes = refuse_as_cpu(op, args, kwargs)
            for out, shape in zip(written, shapes or (), strict=False):
                _refuse_to_resize_what_is_shared(op, out, shape)
                if tuple(out.shape) != shape:
                    kind = None  # the next tensor may be a view
        else:
            return call_exactly(op, run, written, keys, *boxable(op, args), **kwargs)
        before = [inner_of(out) for out in written]
        found = call_exactly(op, run, written, keys, *boxable(op, args), **kwargs)
        kept = [_keep_strides(out, old) for out, old in zip(written, before, strict=True)]
        if kind is not None and not any(kept) and not any(map(is_of_expanded, written)):
            if len(known) >= _KNOWN_AT_MOST:
                known.clear()
            known.add(kind)
        return found

    return call


def _keep_strides(out: torch.Tensor, before: torch.Tensor) -> bool:
    """Give a written tensor the strides of its former value, by which views and ``reshape`` go.

    Returns whether the strides differed: functionalization stores the result with the result's own strides.
    """
    if out.shape != before.shape or out.stride() == before.stride() or not is_dense(before.shape, before.stride()):
        return False
    value = inner_of(out)
    write_back(out, torch.ops.aten.copy.default(before, value))
    return True


_KNOWN_AT_MOST: Final = 1024
_PLAIN: Final = frozenset({int, float, bool, complex, str, type(None), torch.dtype})


def _describe(value: Any, written: Sequence[Any], signature: list[Any]) -> bool:
    """Add one argument to a signature, which holds everything that the CPU's answer depends on.

    False for an argument that a signature does not cover: a tensor that shares memory with a written one, a written
    view of an expanded tensor, or a tensor of another device.
    """
    if isinstance(value, torch.Tensor):
        place = -1
        for at, out in enumerate(written):
            if value is out:
                if is_of_expanded(value):
                    return False
                place = at
            elif out is None or _is_alias_of(out, value):
                return False
        signature += (place, value.shape, value.stride(), value.dtype)
        return _is_functional(value)
    if not isinstance(value, (list, tuple)):
        return False
    items: Sequence[Any] = value  # pyright: ignore[reportUnknownVariableType]
    if not any(isinstance(one, torch.Tensor) for one in items):
        signature.append(repr(items))
        return True
    signature.append(len(items))
    return all(isinstance(one, torch.Tensor) and _describe(one, written, signature) for one in items)


def _is_ours(value: Any) -> bool:
    """Whether a value is a functionalization wrapper of a handle, which is what a program holds."""
    if not isinstance(value, torch.Tensor) or not _is_functional(value):
        return False
    return isinstance(inner_of(value), LazyTensor)


def _refuse_to_resize_what_is_shared(op: Any, out: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise :class:`UnsupportedOp` for a view of another shape, or one that has views or was detached.

    On the CPU all of them go on sharing memory, which then holds the result.
    """
    if tuple(out.shape) == shape:
        return
    is_view = not torch._is_functional_tensor_base(out)
    if is_view or _is_shared(out):
        what = "is a view of" if is_view else "shares its memory with another tensor, has"
        raise UnsupportedOp(
            f"out= {what} shape {list(out.shape)}, and the result has shape {list(shape)}: this device cannot give "
            "such a tensor another shape; pass a tensor of its own, or one of the result's shape",
            op=str(op),
            source=user_line(),
        )


def _is_shared(wrapper: torch.Tensor) -> bool:
    """Whether another tensor shares a functionalization wrapper's memory: a view, what was detached, or ``.data``."""
    return holders_of_storage(wrapper) > 2  # the wrapper, and Python's object of the storage
