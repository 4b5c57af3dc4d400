"""What the worker does: read a request, prepare it, answer. One at a time, for as long as there are requests."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch

from ..backend.builder import capture_of
from ..backend.interface import Backend
from ..backend.kept import find_known, find_or_prepare
from ..backend.optional import optional_of
from ..backend.prepare import Prepared
from ..backend.registry import make_by_recipe
from ..backend.serialize import fingerprint
from ..core.config import config
from ..core.default_state import default_state
from ..core.specs import CompileSpecs
from ..native import beside
from ..trace.graph import Sources, write_graph
from .graphs import graph_from_data
from .paths import NotSendable, define, path_from_data
from .protocol import Kind, read_message, write_message
from .request import KNOWN, PATH, NotKnown, Question, failure_to_data, prepared_to_data, read_request, settings_in_force

__all__ = ["BOUNDS", "compile_request", "serve"]

BOUNDS: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHPORT_COMPILE_WORKERS": "0",
    # Compiling for an accelerator should not take the memory that the program computes in.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""What the worker's environment has instead of the program's: threads of its own are few."""


def serve(fd: int) -> None:
    """Answer what comes by a socket until it is closed."""
    program = socket.socket(fileno=fd)
    torch.set_num_threads(1)
    config.compile_workers = 0
    write_message(program, Kind.READY, b"")
    while True:
        try:
            kind, body = read_message(program)
        except EOFError:
            return
        if kind is Kind.SURROUNDINGS:
            _move_to(*pickle.loads(body))
            continue
        os.ftruncate(2, 0)  # what a crash report shows is this request's
        write_message(program, Kind.BEGUN, b"")
        write_message(program, Kind.REPLY, compile_request(body))
        beside.build_beside()


def _move_to(environ: dict[str, str], path: Sequence[str], folder: str) -> None:
    """Have the program's environment, search path and folder."""
    os.environ.clear()
    os.environ.update({**environ, **BOUNDS})
    sys.path[:] = path
    try:
        os.chdir(folder)
    except OSError:
        os.chdir("/")


_backends: Final[dict[str, Backend]] = {}


def _backend(recipe: str) -> Backend:
    found = _backends.get(recipe)
    if found is None:
        found = _backends[recipe] = make_by_recipe(recipe)
    return found


def compile_request(body: bytes) -> bytes:
    """The answer to a request, which may be that it failed."""
    try:
        question = read_request(body)
        with settings_in_force(question.settings), default_state():
            return prepared_to_data(*_compile(question))
    except Exception as error:
        return failure_to_data(error)


def _compile(question: Question) -> tuple[Prepared, Sources | None]:
    backend, specs = _backend(question.recipe), CompileSpecs(question.specs)
    define(question.definitions)
    sources: Sources | None = None
    if question.kind in (PATH, KNOWN):
        given = path_from_data(question.content)
        made = write_graph(given.path, given.outputs, given.leaf_specs, capture_of(backend), given.donated)
        if made.refusals:
            raise NotSendable(f"{backend.name!r} does not take all of it: {made.refusals[0].reason}")
        graph, sources = made.module, made
    else:
        graph = graph_from_data(*question.content)
        _rename(graph, question.names)
    able = optional_of(backend).compiler_settings
    with nullcontext() if able is None else able.compiling_under(question.engine):
        if question.kind == KNOWN:
            found = find_known(backend, specs, graph, fingerprint(graph))
            if found is None:
                raise NotKnown
            return found, sources
        return find_or_prepare(backend, specs, graph, fingerprint(graph), question.source), sources


def _rename(graph: Any, names: Sequence[str]) -> None:
    """Give the inputs the names that they have in the program: backends may keep them."""
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
