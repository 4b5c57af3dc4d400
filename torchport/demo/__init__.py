"""What ``torchport demo`` runs: three unmodified PyTorch programs, on CPU eager and on the device."""
