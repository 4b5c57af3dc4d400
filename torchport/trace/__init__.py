"""Tracing: operator calls become a path in a trie, and a path becomes an FX graph in normal form. Nothing is run here.

``kernels`` (one Python kernel per operator) → ``keys`` → ``trie`` and ``trace`` (the cursor) → ``record`` with
``decide`` (first-time operators only) → ``graph``. ``handle`` is the tensor they all pass around, ``pool`` hands
handles out again, ``threads`` says whose trace is whose, and ``eager`` is the other mode. Whoever runs a trace is its
``Runner``.
"""
