"""The lazy core: ops become a path in a trie, a path becomes an FX graph in normal form, a graph becomes a computation.

In the order data flows: ``kernel`` (one Python kernel per operator) → ``trace`` (the trie and its cursor) → ``record``
with ``decide`` (first-time ops only) → ``graph`` with ``random`` (trie path → normal form) → ``plans`` (which
computation brings which values) → ``executor`` (flush) → ``jobs`` (runs, now or on the device's own thread), with
``alone`` and ``isolate`` for one operator at a time. ``eager`` is the other mode; ``reasons`` and ``history`` are for
people. ``runtime`` holds what belongs to one device index; ``tensor`` is the handle they all pass around.
"""
