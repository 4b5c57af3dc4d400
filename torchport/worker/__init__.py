"""Compiling in another process, so that the program's thread and Python's lock are left alone.

``service`` is the program's side: it starts a process when one is first needed, hands it requests and keeps what comes
back. ``paths`` and ``graphs`` write what is to be compiled as bytes, ``request`` puts the settings with it.
``main`` is the process itself: a small one that watches, and beside it the one that compiles (``compiling``).
"""
