"""What the server that forks workers imports first: PyTorch and its databases, nothing of an engine."""

from . import torch_api  # noqa: F401
