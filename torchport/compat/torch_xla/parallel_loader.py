"""``torch_xla.distributed.parallel_loader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import torchport

__all__ = ["MpDeviceLoader"]


class MpDeviceLoader:
    """Batches of a loader, on the device; a step ends with each. PyTorch/XLA's other arguments have no meaning here."""

    def __init__(self, loader: Iterable[Any], device: torch.device, **kwargs: Any) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
            torchport.sync(wait=False)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]
