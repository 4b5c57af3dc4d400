"""Where a view lies in its base. A handle does not know: the handle of a view has a value of its own.

Functionalization knows by which views a tensor was made, and autograd knows the base.

Private torch APIs used here: ``torch._C._functionalization.get_view_meta_sequence`` and
``apply_view_meta_sequence``, ``torch._is_functional_tensor``, ``torch._is_functional_tensor_base``,
``torch._C._storage_Use_Count``.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...core.default_state import default_state
from ...core.specs import is_dense

__all__ = ["as_view", "begins_somewhere", "holders_of_storage", "offset", "place"]

_views: Final[Any] = torch._C._functionalization  # type: ignore[attr-defined]
_storage_of: Final[Any] = torch.Tensor.untyped_storage  # as it is before anybody wraps it


def place(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The ``id`` of a tensor's base, and a meta tensor that lies in its base as the tensor does.

    A wrapper knows the views that it was made by, but not the shape of the base; autograd knows the base.
    """
    base: Any = tensor._base
    root = tensor if base is None else base
    placed = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
    made_by = _views.get_view_meta_sequence(tensor)[len(_views.get_view_meta_sequence(root)) :]
    return id(root), _views.apply_view_meta_sequence(placed, [as_view(meta) for meta in made_by])


def as_view(meta: Any) -> Any:
    """The same view step of functionalization, giving a view instead of a copy."""
    parts = list(meta.as_tuple())
    mode = next(at for at, part in enumerate(parts) if isinstance(part, _views.InverseReturnMode))
    parts[mode - 1] = True  # ``reapply_views``
    return type(meta)(tuple(parts))


def begins_somewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows a part of a base that only functionalization knows, as ``x[1:].detach()`` does."""
    if tensor._is_view() or not torch._is_functional_tensor(tensor) or torch._is_functional_tensor_base(tensor):
        return False
    whole = tensor.numel() * tensor.element_size() == _storage_of(tensor).nbytes()
    return not (whole and is_dense(tensor.shape, tensor.stride()))


def offset(tensor: torch.Tensor) -> int | None:
    """A tensor's offset in its storage in elements, as a CPU tensor would have it; ``None`` where it is not known."""
    if not torch._is_functional_tensor(tensor) or torch._is_functional_tensor_base(tensor):
        return 0
    if tensor._base is None:
        return None if begins_somewhere(tensor) else 0
    if begins_somewhere(tensor._base):
        return None
    with default_state():
        placed = place(tensor)[1]
    return int(placed.storage_offset())


def holders_of_storage(tensor: torch.Tensor) -> int:
    """How many tensors, and other objects, hold a tensor's storage; one more for Python's object of the storage."""
    storage: Any = torch._C.TensorBase.untyped_storage(tensor)  # type: ignore[attr-defined]
    return torch._C._storage_Use_Count(storage._cdata)
