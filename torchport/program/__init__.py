"""The program file and its runtime: imports neither lowering nor the device, and PyTorch only when it is needed."""
