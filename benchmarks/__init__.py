"""Ratios of the ``port`` device against peers measured in the same process: ``python -m benchmarks``."""
