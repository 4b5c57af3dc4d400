"""Compiled graphs that another process has made, in the disk cache: found there, else made and kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter, time
from typing import Final

from torch import fx

from ..cache.current import disk_cache
from ..cache.entry import CacheEntry, key_of
from ..cache.folder import CacheFolder
from ..core import metrics
from ..core.config import config
from ..core.errors import CacheMiss, GraphError
from ..core.specs import CompileSpecs
from .compile_key import Uncacheable, manifest_of
from .interface import Backend
from .optional import optional_of
from .pieced import assemble
from .pieces import cut, in_pieces, pays, whole
from .prepare import Prepared, describe, with_bytes, with_bytes_of_all
from .serialize import fingerprint
from .sizes.families import compiled_for_several, may_vary, served

__all__ = ["find_kept", "find_known", "find_or_prepare", "prepare_all"]

log: Final = logging.getLogger("torchport.cache")


def find_kept(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, mark: str) -> Prepared | None:
    """What is there for this graph: in the disk cache, or of a computation for several sizes.

    ``None`` where nothing is. Nothing is compiled or waited for.
    """
    folder = disk_cache()
    about = describe(graph, mark, None)
    if folder is not None:
        try:
            key = key_of(manifest_of(backend, specs, graph, mark, about.inputs, about.outputs, folder.digests))
            entry = folder.read(key)
        except Uncacheable:
            entry = None
        else:
            if entry is not None:
                return replace(about, data=entry.data, kept=key, entry=key)
    return _served(backend, specs, graph, about)


def find_known(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, mark: str) -> Prepared | None:
    """As :func:`find_kept`, also for a graph in pieces that are all there. Nothing is compiled or waited for."""
    found = find_kept(backend, specs, graph, mark)
    pieces = cut(graph, backend.capabilities.fixed_compile_cost) if found is None and in_pieces(backend) else None
    if pieces is None:
        return found
    with whole():
        parts = [find_kept(backend, specs, one, fingerprint(one)) for one in pieces.graphs]
    kept = [one for one in parts if one is not None]
    return replace(describe(graph, mark, None), data=assemble(pieces, kept)) if len(kept) == len(parts) else None


def _served(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared) -> Prepared | None:
    return served(backend, specs, graph, about) if may_vary(backend) else None


def find_or_prepare(
    backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, mark: str, source: str | None = None
) -> Prepared:
    """As :func:`prepare`, from the disk cache if it has that, else kept there. Raises :class:`CompileError`.

    While another process compiles the same, it is waited for. Raises :class:`CacheMiss` where nothing may be compiled.
    """
    about = describe(graph, mark, source)
    folder = disk_cache()
    depends_on = None if folder is None else _manifest(folder, backend, specs, graph, about)
    if folder is None or depends_on is None:
        return _served(backend, specs, graph, about) or _made(backend, specs, graph, about)
    key = key_of(depends_on)
    entry = folder.read(key)
    if entry is None and (found := _served(backend, specs, graph, about)) is not None:
        return found
    if entry is None and config.cache == "cache-only":
        raise CacheMiss(_told_of_miss(folder, key, depends_on), op=about.label, source=about.source)
    if entry is None:
        with folder.compiling(key, config.compile_timeout):
            entry = folder.read(key)  # whoever had the lock may have made it
            if entry is None:
                made = _made(backend, specs, graph, about)
                return made if made.missed else _kept_now(folder, backend, specs, graph, depends_on, made)
    return replace(about, data=entry.data, kept=key, entry=key)


def _made(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared) -> Prepared:
    """What is known of a graph, with its bytes: in pieces, where its layers repeat and the backend takes that; for
    several sizes, where it came with others before and the backend has such computations (which are kept already)."""
    fixed = backend.capabilities.fixed_compile_cost
    pieces = cut(graph, fixed) if in_pieces(backend) else None
    if pieces is None:
        return _whole(backend, specs, graph, about)
    start = perf_counter()
    marks = [fingerprint(one) for one in pieces.graphs]
    graphs = dict(zip(marks, pieces.graphs, strict=True))
    with whole():
        kept = {mark: find_kept(backend, specs, one, mark) for mark, one in graphs.items()}
        missing = {mark: one for mark, one in graphs.items() if kept[mark] is None}
        if not pays(about.ops, list(missing.values()), fixed):
            return _whole(backend, specs, graph, about)
        if optional_of(backend).preprocess_all is not None:
            made = prepare_all(backend, specs, missing, about.source)
        else:
            made = [find_or_prepare(backend, specs, one, mark, about.source) for mark, one in missing.items()]
    found = {one.mark: one for one in (*kept.values(), *made) if one is not None}
    data = assemble(pieces, [found[mark] for mark in marks])
    return replace(about, data=data, seconds=perf_counter() - start)


def _whole(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared) -> Prepared:
    several = compiled_for_several(backend, specs, graph, about) if may_vary(backend) else None
    return several or with_bytes(backend, specs, graph, about)


def prepare_all(
    backend: Backend, specs: CompileSpecs, graphs: Mapping[str, fx.GraphModule], source: str | None
) -> list[Prepared]:
    """As :func:`find_or_prepare` for several graphs, by fingerprint, of a backend that compiles them together.

    Other processes that compile the same are not waited for.
    """
    found = [find_kept(backend, specs, graph, mark) for mark, graph in graphs.items()]
    missing = {mark: graph for (mark, graph), one in zip(graphs.items(), found, strict=True) if one is None}
    ready = [one for one in found if one is not None]
    if config.cache != "cache-only" and may_vary(backend):
        for mark, graph in list(missing.items()):
            several = compiled_for_several(backend, specs, graph, describe(graph, mark, source))
            if several is not None:
                ready.append(several)
                del missing[mark]
    if len(missing) < 2 or config.cache == "cache-only":
        return ready + [find_or_prepare(backend, specs, graph, mark, source) for mark, graph in missing.items()]
    folder = disk_cache()
    abouts = [describe(graph, mark, source) for mark, graph in missing.items()]
    manifests = [
        None if folder is None else _manifest(folder, backend, specs, graph, about)
        for graph, about in zip(missing.values(), abouts, strict=True)
    ]
    made = with_bytes_of_all(backend, specs, list(missing.values()), abouts)
    return ready + [
        one if folder is None or manifest is None else _kept_now(folder, backend, specs, graph, manifest, one)
        for graph, manifest, one in zip(missing.values(), manifests, made, strict=True)
    ]


def _manifest(
    folder: CacheFolder, backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared
) -> dict[str, str] | None:
    """What the bytes depend on; ``None``, counted, for what is not kept on disk."""
    try:
        return manifest_of(backend, specs, graph, about.mark, about.inputs, about.outputs, folder.digests)
    except Uncacheable as why:
        metrics.count("NotCacheable")
        log.debug("not looked for on disk: %s", why)
        return None


def _kept_now(
    folder: CacheFolder,
    backend: Backend,
    specs: CompileSpecs,
    graph: fx.GraphModule,
    depends_on: dict[str, str],
    made: Prepared,
) -> Prepared:
    """What was just made, kept under what it was to depend on before ``preprocess`` had the graph."""
    if config.verify_graphs:
        after = manifest_of(backend, specs, graph, fingerprint(graph), made.inputs, made.outputs, folder.digests)
        if changed := _differences(depends_on, after):
            raise GraphError(
                f"preprocess of backend {backend.name!r} changed what it was given ({', '.join(changed)}), so "
                "what it gave would be kept under a wrong key: change a copy of the graph"
            )
    return replace(made, missed=True, entry=_keep(folder, backend, depends_on, made))


def _keep(folder: CacheFolder, backend: Backend, manifest: dict[str, str], made: Prepared) -> str:
    """The key of the entry; "" if there is none."""
    if made.data:
        about = {
            "backend": backend.name,
            "operators": made.ops,
            "inputs": [str(spec) for spec in made.inputs],
            "outputs": [str(spec) for spec in made.outputs],
            "seconds": round(made.seconds, 3),
            "written": time(),
        }
        entry = CacheEntry(manifest, bytes(made.data), about)
        return entry.key if folder.write(entry) else ""
    return ""


def _differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _told_of_miss(folder: CacheFolder, key: str, manifest: dict[str, str]) -> str:
    """What a miss is told as: what is nearest to it, and where it differs."""
    said = f"the disk cache in {folder.path} has no entry {key[:12]}, and config.cache is 'cache-only'"
    nearest = folder.nearest(manifest)
    if nearest is None:
        return f"{said}; it has no entry at all"
    lines = [f"{said}; the nearest entry is {nearest.key[:12]}, which differs in"]
    for name in _differences(manifest, dict(nearest.manifest)):
        there, here = nearest.manifest.get(name, "nothing"), manifest.get(name, "nothing")
        lines.append(f"    {name}: {there} there, {here} here")
    return "\n".join(lines)
