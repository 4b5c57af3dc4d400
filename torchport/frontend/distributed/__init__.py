"""``torch.distributed`` for tensors of the device: collectives between computations, and faults that are told."""
