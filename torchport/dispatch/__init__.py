"""c10's dispatcher in Python: keys, key sets, operator tables, calls. Independent of torch.

What it decides, and what it leaves to whom, is in ``docs/dispatch.md``.

====================  ==================================================================================
``keys``              backends (an open registry), functionalities, dispatch keys
``keyset``            sets of keys, alias keys, backend ↔ autograd maps
``tls``               keys included and excluded per thread
``schema``            operator schemas
``rules``             how a table row is chosen: one ordered list
``extract``           which keys an argument carries
``operator``          how a call is decided
``dispatcher``        registering, calling, looking up
``messages``          error texts
``torch_bridge``      to and from PyTorch's own dispatcher (the only module that touches torch)
====================  ==================================================================================
"""

from __future__ import annotations

from .dispatcher import BackendKernels, Dispatcher
from .keys import (
    BackendComponent,
    BackendRegistry,
    DispatchKey,
    Functionality,
    KeyClass,
    backends,
    runtime_key,
    runtime_keys,
)
from .keyset import (
    DEFAULT_EXCLUDED,
    DEFAULT_INCLUDED,
    DispatchKeySet,
    alias_keys,
    autograd_from_backend,
    backend_from_autograd,
    in_alias,
    tensor_keys,
)
from .operator import Decision, Operator
from .rules import Registration, Row, Rule, Verdict, fallthrough
from .schema import Argument, Schema, parse_schema
from .tls import exclude, force, include, local_keys

__all__ = [
    "DEFAULT_EXCLUDED",
    "DEFAULT_INCLUDED",
    "Argument",
    "BackendComponent",
    "BackendKernels",
    "BackendRegistry",
    "Decision",
    "DispatchKey",
    "DispatchKeySet",
    "Dispatcher",
    "Functionality",
    "KeyClass",
    "Operator",
    "Registration",
    "Row",
    "Rule",
    "Schema",
    "Verdict",
    "alias_keys",
    "autograd_from_backend",
    "backend_from_autograd",
    "backends",
    "default",
    "exclude",
    "fallthrough",
    "force",
    "in_alias",
    "include",
    "local_keys",
    "parse_schema",
    "runtime_key",
    "runtime_keys",
    "tensor_keys",
]

default = Dispatcher()
"""The process's dispatcher: backends register here, the device asks it, ``explain`` reads it."""
