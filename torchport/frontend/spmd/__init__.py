"""One program over all devices of a mesh: tensors are placed, and the engine partitions what is computed from them."""
