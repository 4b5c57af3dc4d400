"""The doors users come through: the ``port`` device and torch.compile."""
