"""The lazy core: ops become a path in a trie, a path becomes an FX graph in normal form, a graph becomes a computation.

In the order data flows: ``kernel`` (one Python kernel per operator) → ``trace`` (the trie and its cursor) → ``infer``
(first-time ops only) → ``graph`` with ``lowering`` and ``random`` (trie path → normal form) → ``executor`` (flush,
plans, computations). ``runtime`` holds what belongs to one device index; ``tensor`` is the handle they all pass around.
"""
