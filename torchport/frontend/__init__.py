"""The ways into torchport: the ``port`` device and torch.compile."""

# First of all: at its end ``import torch`` imports this package (``torch.backends``), and must not find a module of it
# half imported, as the one that has just begun with its own ``import torch``.
import torch  # noqa: F401
