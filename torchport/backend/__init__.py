"""The contract between PyTorch programs and engines: the backend interface, its registry, the graph's normal form."""
