"""Foundations that import nothing else of torchport: errors, configuration, metrics, specs, dispatch."""
