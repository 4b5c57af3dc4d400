"""Arguments that carry keys, without torch."""

from __future__ import annotations

from torchport.dispatch import DispatchKey, DispatchKeySet


class Thing:
    """Stands for a tensor: it has a key set and nothing else."""

    def __init__(self, *keys: str | DispatchKey) -> None:
        self.dispatch_keys = DispatchKeySet(*keys)

    dispatch_keys: DispatchKeySet


CPU = Thing("CPU", "ADInplaceOrView", "AutogradCPU")
CUDA = Thing("CUDA", "ADInplaceOrView", "AutogradCUDA")
SPARSE = Thing("SparseCPU", "ADInplaceOrView", "AutogradCPU")
