"""``torch.distributed`` for tensors of the device: a process group, collectives as cut points, and faults that are told."""
