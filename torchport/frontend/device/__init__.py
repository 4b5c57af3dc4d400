"""``torch.device("port")``: registered when torch is imported (``register``), filled with kernels on first use (``install``)."""
