"""``torch.device("port")``: registered when torch is imported (``register``), filled on first use (``install``)."""
