"""Which graphs are equal but for sizes, and the computations that serve several of them.

The first graph of a form is compiled for its sizes, unless the program has marked what will vary. With the second, one
computation is compiled whose sizes are symbols, or for a bucket of sizes where the backend has no symbols. It serves
every further graph that the form describes and the guards allow. A graph that does not fit, since what was taken for a
constant varies, too, leads to another. Families are kept with the disk cache: a process that meets sizes which none has
met before compiles nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import fx

from ...cache.current import disk_cache
from ...cache.entry import CacheEntry, key_of
from ...cache.folder import CacheFolder
from ...core import metrics
from ...core.config import config
from ...core.errors import CompileError
from ...core.forks import guarded_lock
from ...core.sharding import is_partitioned
from ...core.specs import CompileSpecs
from ...core.varying import marks
from ..answers import checked_processed
from ..compile_key import Uncacheable, manifest_of
from ..container import pack, unpack
from ..interface import Backend
from ..optional import SupportsSymbolicSizes, optional_of
from ..prepare import Prepared, describe, failure_of, with_bytes
from .chosen import bucket_for, is_padded_little, padding_of
from .form import Form, Size, Sketch, form_of, sketch_of
from .guards import NotSymbolic, hold, within
from .marked import bounds_of, marked_form
from .padded import Padding, padded_graph, padding_from_json, padding_to_json
from .sized import base_from, base_to, sized

__all__ = ["compiled_for_several", "families", "forget", "may_vary", "served"]

log: Final = logging.getLogger("torchport.compile")

FAMILIES: Final = 256
"""Forms that are remembered."""
SKETCHES: Final = 8
"""Graphs of one form that are remembered: what varied once is known to vary."""
TRIES: Final = 4
"""Computations with symbols for sizes of one digest, and failures to make one."""
BUCKETS: Final = 8
"""The same for computations of which each is for one bucket."""
_MAGIC: Final = b"TPFORMS2"


@dataclass(frozen=True, slots=True)
class _ForSeveral:
    """A computation for several sizes: of which form, under which condition on its symbols."""

    form: Form
    guards: str
    base: Prepared
    padding: Padding | None = None
    """How sizes become those that it was compiled for, where they are no symbols to the backend."""

    def serves(self, sketch: Sketch, made: int) -> float:
        """How many times as large sizes become where it computes what a graph with the form's digest does; else
        infinite. ``made``: how many computations for buckets there are."""
        if not self.form.describes(sketch):
            return math.inf
        values, padding = self.form.values(sketch), 1.0
        if self.padding is not None:
            if not is_padded_little(values, self.padding.bucket, made):
                return math.inf
            padding = padding_of(values, self.padding.bucket)
        return padding if hold(self.guards, values) else math.inf

    def prepared(self, about: Prepared, sketch: Sketch, new: bool) -> Prepared:
        """A graph that it serves, of which ``about`` is known; ``new``: it was made just now."""
        return sized(about, self.base, new, self.padding, self.form.values(sketch))


class _Sketches(list[Sketch]):
    """A list that can be referred to weakly."""


@dataclass(slots=True)
class _Family:
    """What is known of the graphs of one digest."""

    sketches: _Sketches
    """Graphs with the same operators, whichever of their values are results."""
    made: list[_ForSeveral] = field(default_factory=list[_ForSeveral])
    tries: int = 0
    refused: set[frozenset[int]] = field(default_factory=set[frozenset[int]])
    """What varied where the backend had no code with symbols."""

    @property
    def padded(self) -> int:
        """How many of what was made are for a bucket."""
        return sum(one.padding is not None for one in self.made)

    def best(self, sketch: Sketch) -> _ForSeveral | None:
        """The computation that serves a graph of this digest with least padding."""
        padding = [one.serves(sketch, self.padded) for one in self.made]
        least = min(padding, default=math.inf)
        return None if math.isinf(least) else self.made[padding.index(least)]


families: Final[OrderedDict[tuple[str, ...], _Family]] = OrderedDict()
"""By backend, compile specs and digest; the one that was used last is at the end."""
_bodies: Final[WeakValueDictionary[tuple[str, ...], _Sketches]] = WeakValueDictionary()
"""The graphs of families that differ in what their results are alone."""
_lock: Final = guarded_lock()
"""Held while families are looked through: the compile service's thread loads computations beside the program's."""


def may_vary(backend: Backend) -> bool:
    """Whether one computation of a backend may serve several sizes: it has symbols for sizes, or its values are in
    memory of the host, where padding them is cheap. The settings allow it."""
    # Which sizes share a computation depends on which came before, and the last bits of a value depend on that.
    if config.sizes != "auto" or is_partitioned(backend) or torch.are_deterministic_algorithms_enabled():
        return False
    return optional_of(backend).symbolic_sizes is not None or _is_padded(backend)


def _is_padded(backend: Backend) -> bool:
    able = backend.capabilities
    return able.slow_to_compile and not able.skips_cache and next(iter(backend.devices())).type == "cpu"


def _family(backend: Backend, specs: CompileSpecs, sketch: Sketch) -> _Family:
    engine = (backend.name, str(backend.version), specs.fingerprint())
    key, of_body = (*engine, sketch.digest), (*engine, sketch.body)
    with _lock:
        found = families.get(key)
        if found is None:
            # Which values are results may differ from step to step, as what is still held does: what varies does not.
            found = families[key] = _Family(_bodies.setdefault(of_body, _Sketches()))
            while len(families) > FAMILIES:
                families.popitem(last=False)
        else:
            families.move_to_end(key)
    return found


def served(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared) -> Prepared | None:
    """What a computation for several sizes gives for a graph; ``None`` where there is none. Nothing is compiled."""
    sketch = sketch_of(graph)
    if sketch is None:
        return None
    family = _family(backend, specs, sketch)
    found = family.best(sketch)
    if found is None:  # another process may have made one meanwhile: the one that compiles beside this
        known = {one.base.mark for one in family.made}
        family.made += [one for one in _kept(backend, specs, graph, about, sketch) if one.base.mark not in known]
        found = family.best(sketch)
    if found is None:
        return None
    return found.prepared(about, sketch, new=False)


def forget(mark: str) -> None:
    """Have no computation for several sizes with this fingerprint: the engine does not take it."""
    with _lock:
        for family in families.values():
            family.made = [one for one in family.made if one.base.mark != mark]


def compiled_for_several(
    backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared
) -> Prepared | None:
    """A graph by a new computation for several sizes, among them those that were seen before of its form.

    ``None`` for the first graph of a form, which it remembers, unless the program has said what will vary; and where
    there can be no such computation.
    """
    sketch = sketch_of(graph)
    if sketch is None:
        return None
    family = _family(backend, specs, sketch)
    family.sketches[:] = [*(one for one in family.sketches if one.integers != sketch.integers), sketch][-SKETCHES:]
    alike = [one for one in family.sketches if one.varies_from(sketch)]
    if alike:
        form = form_of([*alike, sketch])
    else:
        form = marked_form(graph, sketch) if marks() and not family.made else None
    if form is None:
        return None
    padded, varying = family.padded, frozenset(form.varying)
    able = None if varying in family.refused else optional_of(backend).symbolic_sizes
    if family.tries >= (BUCKETS if able is None or padded else TRIES):
        return None
    asked = _Asked(backend, specs, graph, about, form, sketch)
    bounds = bounds_of(sketch, form)

    def bucket() -> tuple[int, ...] | None:
        return _bucket(form.values(sketch), [form.values(one) for one in alike], padded, [high for _, high in bounds])

    if able is None and (not _is_padded(backend) or bucket() is None):
        return None
    family.tries += 1
    start = perf_counter()
    try:
        try:
            made = _compiled(asked, able, bucket)
        except _Refused as error:
            family.refused.add(varying)
            if not _is_padded(backend) or bucket() is None:
                raise
            log.info("sizes are padded, since there is no code with symbols for them: %s", error)
            made = _compiled(asked, None, bucket)
    except Exception as error:  # whatever it is: the graph itself, for its own sizes, may compile all the same
        metrics.count("NotSymbolic")
        log.info("compiled for one set of sizes, since there is no code for several: %s", error)
        return None
    guards = within(made.guards, bounds)
    made = replace(made, guards=guards, base=replace(made.base, seconds=perf_counter() - start))
    if math.isinf(made.serves(sketch, padded)):
        metrics.count("NotSymbolic")
        log.info("compiled for one set of sizes, since code for several would need %s", made.guards)
        return None
    family.made.insert(0, made)
    metrics.count("ForSeveralSizes")
    log.info("compiled for several sizes (%s)", made.guards)
    folder = disk_cache()
    if folder is not None:
        _keep(folder, backend, specs, graph, about, sketch, family.made)
    return made.prepared(about, sketch, new=True)


def _bucket(
    values: tuple[int, ...], seen: Sequence[tuple[int, ...]], count: int, most: Sequence[int | None]
) -> tuple[int, ...] | None:
    """What sizes are to be padded to; ``None`` where that costs too much. ``count``: how many buckets there are."""
    found = bucket_for(values, seen, count, most)
    if not is_padded_little(values, found, count):
        found = bucket_for(values, [], 0)
    return found if is_padded_little(values, found, count) else None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A graph to be compiled for several sizes."""

    backend: Backend
    specs: CompileSpecs
    graph: fx.GraphModule
    about: Prepared
    form: Form
    sketch: Sketch

    def mark(self, values: tuple[int, ...]) -> str:
        """The fingerprint of a computation that is made for these sizes, or like them."""
        form = self.form
        # Two forms may describe one graph, such as one whose batch is as large as its length is: they are told apart.
        said = repr((form.sources, sorted((at, size.terms) for at, size in form.varying.items()))).encode()
        of = hashlib.blake2b(said).hexdigest()[:16]
        return f"{self.about.mark} for several sizes, as {','.join(map(str, values))} {of}"


class _Refused(NotSymbolic):
    """A backend has no code with symbols for a graph."""


def _compiled(
    asked: _Asked, able: SupportsSymbolicSizes | None, bucket: Callable[[], tuple[int, ...] | None]
) -> _ForSeveral:
    """With symbols, by a backend that has them, else for a bucket. Raises :class:`_Refused`."""
    from .symbolic import symbolic_graph  # on demand: compiling needs it and sympy, running does not

    backend, about, form, sketch = asked.backend, asked.about, asked.form, asked.sketch
    symbolic = symbolic_graph(asked.graph, form, sketch)
    if able is not None:
        try:
            data = checked_processed(backend, able.preprocess_symbolic(symbolic.module, asked.specs)).data
        except NotSymbolic as error:
            raise _Refused(str(error)) from error
        except Exception as error:
            raise failure_of(backend, error, about.label, about.source) from error
        return _ForSeveral(form, symbolic.guards(), replace(about, data=data, mark=asked.mark(form.values(sketch))))
    to = bucket()
    assert to is not None
    module, padding = padded_graph(backend, asked.graph, form, sketch, symbolic, to)
    known = replace(describe(module, asked.mark(to), about.source), label=about.label)
    return _ForSeveral(form, symbolic.guards(), with_bytes(backend, asked.specs, module, known), padding)


# -- the disk cache ----------------------------------------------------------------------------------------------------
def _manifest(
    folder: CacheFolder, backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared, sketch: Sketch
) -> dict[str, str] | None:
    """What a family depends on: all that its graphs have in common. ``None`` for what is not kept."""
    try:
        exact = manifest_of(backend, specs, graph, about.mark, about.inputs, about.outputs, folder.digests)
    except Uncacheable:
        return None
    return {**exact, "graph": f"for several sizes {sketch.digest}", "inputs": "", "outputs": "", "values": ""}


def _kept(
    backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared, sketch: Sketch
) -> list[_ForSeveral]:
    """What the disk cache has for graphs of this form."""
    folder = disk_cache()
    depends_on = None if folder is None else _manifest(folder, backend, specs, graph, about, sketch)
    if folder is None or depends_on is None:
        return []
    key = key_of(depends_on)
    entry = folder.read(key)
    if entry is None:
        return []
    try:
        return unpack(_MAGIC, entry.data, backend.name, lambda known, parts: _read(known, parts, key))
    except CompileError:  # of another version of this module
        folder.drop(key)
        return []


def _read(known: Mapping[str, Any], parts: Mapping[str, bytes], key: str) -> list[_ForSeveral]:
    found: list[_ForSeveral] = []
    for at, (constants, sources, varying, guards, padding, base) in enumerate(known["made"]):
        sizes = {
            number: Size(tuple((factor, tuple(symbols)) for factor, symbols in terms)) for number, terms in varying
        }
        form = Form(tuple(constants), tuple(sources), sizes)
        pads = None if padding is None else padding_from_json(padding)
        found.append(_ForSeveral(form, guards, base_from(base, parts[str(at)], key), pads))
    return found


def _keep(
    folder: CacheFolder,
    backend: Backend,
    specs: CompileSpecs,
    graph: fx.GraphModule,
    about: Prepared,
    sketch: Sketch,
    made: Sequence[_ForSeveral],
) -> None:
    depends_on = _manifest(folder, backend, specs, graph, about, sketch)
    if depends_on is None:
        return
    bases = [base_to(one.base) for one in made]
    known = [
        [
            one.form.constants, one.form.sources, [[at, size.terms] for at, size in one.form.varying.items()],
            one.guards, None if one.padding is None else padding_to_json(one.padding), base,
        ]
        for one, (base, _) in zip(made, bases, strict=True)
    ]  # fmt: skip
    data = pack(_MAGIC, {"made": known}, {str(at): data for at, (_, data) in enumerate(bases)})
    folder.write(
        CacheEntry(
            depends_on,
            data,
            {
                "backend": backend.name,
                "operators": about.ops,
                "inputs": [str(spec) for spec in about.inputs],
                "outputs": [str(spec) for spec in about.outputs],
                "sizes": "several",
                "computations": len(made),
                "seconds": round(sum(one.base.seconds for one in made), 3),
            },
        )
    )
