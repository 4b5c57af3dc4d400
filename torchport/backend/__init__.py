"""The contract between PyTorch programs and engines: the backend interface, its registry and the graph's normal form."""
