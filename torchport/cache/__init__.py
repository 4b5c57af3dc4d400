"""Compiled computations on disk, for the next process.

``entry`` is one file's bytes, ``locks`` what a process holds while it works on an entry, ``folder`` the entries of one
folder, ``digests`` what files hold, ``current`` the folder that the settings name, ``command`` the command line's part.
Nothing here knows what a graph or a backend is, and nothing imports PyTorch: what the key of an entry is made of comes
from :mod:`torchport.backend.compile_key`.
"""
