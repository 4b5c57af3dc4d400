"""``load(path)`` → :class:`Program` → ``load_method(name)`` → :class:`Method`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..backend.registry import Registry
from ..backend.registry import registry as default_registry
from ..core.errors import ErrorCode, MethodError, ProgramError
from ..core.forks import guarded_rlock
from . import document as doc
from .delegate import Options, checked_options
from .dynamic import DynamicMethod, extent_name
from .loader import SegmentInfo
from .method import Method, State
from .package import Package, Source, Verification, open_package
from .profile import Event
from .schema import Product, extent_of, product_of
from .values import Host

__all__ = ["DelegateMeta", "MethodMeta", "Program", "TensorMeta", "load"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """An input or output. ``dtype`` is empty where it is no tensor but always ``literal``.

    ``dynamic``: dimensions whose size changes, with a name (empty where there is none) and the range; ``shape`` is the
    largest.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    literal: doc.Literal = None
    dynamic: Mapping[int, tuple[str, int, int]] = field(default_factory=dict[int, tuple[str, int, int]], hash=False)

    def _size(self, dim: int) -> str:
        if dim not in self.dynamic:
            return str(self.shape[dim])
        name, least, most = self.dynamic[dim]
        return (f"{name}=" if name else "") + f"{least}..{most}"

    def __str__(self) -> str:
        if not self.dtype:
            return self.dynamic[0][0] if self.dynamic else repr(self.literal)
        return f"{self.dtype}[{', '.join(map(self._size, range(len(self.shape))))}]"


@dataclass(frozen=True, slots=True)
class DelegateMeta:
    """One delegate: its backend, the size of its bytes, what it was compiled with."""

    backend: str
    version: str
    nbytes: int
    specs: Mapping[str, bytes]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MethodMeta:
    """What a method takes, gives and needs, without loading it."""

    name: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    delegates: tuple[DelegateMeta, ...]
    instructions: int
    kernels: Mapping[str, int]
    state: tuple[str, ...]
    constant_bytes: int
    variants: tuple[MethodMeta, ...] = ()
    """For a method with sizes that change: what it is lowered as; the other fields are of the largest one."""
    padded: bool = False
    reason: str = ""
    """Why inputs are not padded, if they are not."""

    def uses_backend(self, name: str) -> bool:
        """Whether a delegate is the backend's."""
        return any(one.backend == name for meta in (self, *self.variants) for one in meta.delegates)


def _tensor(name: str, spec: doc.Spec | None, literal: doc.Literal) -> TensorMeta:
    if spec is None:
        return TensorMeta(name, "", (), (), 0, literal)
    return TensorMeta(name, spec.dtype, spec.shape, spec.strides, spec.nbytes)


def _ranged(one: TensorMeta, texts: Sequence[str | None], shapes: Sequence[tuple[int, ...]]) -> TensorMeta:
    """A tensor with what is known of its dimensions: their names, where they have one, and the sizes that occur."""
    ranges = [(min(sizes), max(sizes)) for sizes in zip(*shapes, strict=True)]
    dynamic = {
        dim: (text or "", *ranges[dim]) for dim, text in enumerate(texts) if text is not None or len({*ranges[dim]}) > 1
    }
    return replace(one, dynamic=dynamic)


def dynamic_meta(method: str, dynamic: doc.Dynamic, variants: tuple[MethodMeta, ...]) -> MethodMeta:
    """A method with sizes that change, from its variants."""
    largest = variants[dynamic.variants.index(dynamic.largest)]
    ends = [tuple(one.least for one in dynamic.symbols), tuple(one.most for one in dynamic.symbols)]
    names = [one.name for one in dynamic.symbols]
    inputs: list[TensorMeta] = []
    for one, dims in zip(largest.inputs, dynamic.inputs, strict=False):
        texts = [None if isinstance(dim, int) else extent_name(dim, dynamic.symbols) for dim in dims or ()]
        inputs.append(_ranged(one, texts, [tuple(extent_of(dim, end) for dim in dims or ()) for end in ends]))
    outputs: list[TensorMeta] = []
    for at, (one, form) in enumerate(zip(largest.outputs, dynamic.outputs, strict=True)):
        if form is None:
            outputs.append(one)
        elif form.dims is None:
            seen = [int(variant.outputs[at].literal or 0) for variant in variants]
            low, high = (
                (min(seen), max(seen)) if form.number is None else (product_of(form.number, end) for end in ends)
            )
            name = "a size" if form.number is None else _product_name(form.number, names)
            outputs.append(replace(one, literal=None, dynamic={0: (name, low, high)}))
        else:
            shapes_seen = [variant.outputs[at].shape for variant in variants]
            texts = [None if dim is None else _product_name(dim, names) or None for dim in form.dims]
            shapes = [
                tuple(
                    (min, max)[which](shape[d] for shape in shapes_seen) if dim is None else product_of(dim, end)
                    for d, dim in enumerate(form.dims)
                )
                for which, end in enumerate(ends)
            ]
            outputs.append(_ranged(one, texts, shapes))
    return replace(
        largest,
        name=method,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constant_bytes=max(one.constant_bytes for one in variants),
        variants=variants,
        padded=dynamic.padded,
        reason=dynamic.reason,
    )


def _product_name(product: Product, names: Sequence[str]) -> str:
    """A size in words; empty for a plain number."""
    if all(symbol is None for _, symbol in product):
        return ""
    return "*".join(str(number) if symbol is None else names[symbol] for number, symbol in product)


class Program:
    """A program file, open. Nothing is initialised before :meth:`load_method`. Safe to use from several threads."""

    def __init__(
        self,
        package: Package,
        registry: Registry | None = None,
        backend_options: Mapping[str, Options] | None = None,
        profile: bool = False,
        load_events: Sequence[Event] = (),
    ) -> None:
        self.package: Final = package
        self.registry: Final = default_registry if registry is None else registry
        self.load_events: Final = tuple(load_events)
        self._profile = profile
        self._lock = guarded_rlock()
        self._constants: dict[tuple[int, type[Host]], Any] = {}
        self._debug: doc.DebugInfo | None = None
        self._options = checked_options(backend_options or {}, self.backends)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods' names, in the order they were lowered in."""
        return self.package.document.names()

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that delegates need, each once."""
        methods = self.package.document.methods.values()
        return tuple(dict.fromkeys(one.backend for method in methods for one in method.delegates))

    @property
    def producer(self) -> Mapping[str, str]:
        """The versions of what wrote the file."""
        return dict(self.package.document.producer)

    def _described(self, name: str) -> doc.MethodRecord:
        found = self.package.document.methods.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> MethodError:
        dynamic = self.package.document.dynamic.get(name)
        if dynamic is not None:
            variants = ", ".join(dynamic.names(name))
            return MethodError(f"method {name!r} has variants; name one: {variants}", code=ErrorCode.NOT_FOUND)
        return MethodError(
            f"the program has no method {name!r}; it has: {', '.join(self.methods)}", code=ErrorCode.NOT_FOUND
        )

    def meta(self, method: str = "forward") -> MethodMeta:
        """A method's inputs, outputs, delegates and sizes. Raises :class:`MethodError` (``NOT_FOUND``)."""
        dynamic = self.package.document.dynamic.get(method)
        if dynamic is not None:
            variants = tuple(map(self.meta, dynamic.names(method)))
            return dynamic_meta(method, dynamic, variants)
        found = self._described(method)
        document = self.package.document
        kernels = [one.op for one in found.instructions if isinstance(one, doc.KernelRecord)]
        used = {*found.constants.values(), *(c for one in found.delegates for c in one.constants.values())}
        return MethodMeta(
            name=method,
            inputs=tuple(_tensor(one.name, one.spec, one.literal) for one in found.inputs),
            outputs=tuple(_tensor(f"output_{i}", one.spec, one.literal) for i, one in enumerate(found.outputs)),
            delegates=tuple(self._delegate_meta(one) for one in found.delegates),
            instructions=len(found.instructions),
            kernels={op: kernels.count(op) for op in dict.fromkeys(kernels)},
            state=tuple(document.constants[one.constant].name for one in found.state),
            constant_bytes=sum(document.constants[which].spec.nbytes for which in used),
        )

    def _delegate_meta(self, delegate: doc.DelegateRecord) -> DelegateMeta:
        document = self.package.document
        size, _ = document.digests[delegate.entry]
        return DelegateMeta(
            delegate.backend,
            delegate.version,
            size,
            dict(delegate.specs),
            tuple(map(str, delegate.inputs)),
            tuple(map(str, delegate.outputs)),
            tuple(document.constants[which].name for which in delegate.constants.values()),
        )

    def load_method(
        self,
        name: str = "forward",
        *,
        backend_options: Mapping[str, Options] | None = None,
        state: State | None = None,
        profile: bool | None = None,
    ) -> Method:
        """Initialise a method's delegates, in the order of their indices. Everything or nothing: if one fails, those
        before it are destroyed. For a method with sizes that change, this happens per variant, when a call needs it.

        ``backend_options`` are added to the program's. ``state`` is another method's, to share mutable buffers with it.
        Raises :class:`MethodError` for an unknown method or wrong options, :class:`DelegateError` for the rest
        (``NOT_FOUND`` where a backend is not installed or cannot run here).
        """
        if name not in self.methods:
            raise self._unknown(name)
        with self._lock:
            options = {backend: dict(given) for backend, given in self._options.items()}
        for backend, given in checked_options(backend_options or {}, self.backends).items():
            options.setdefault(backend, {}).update(given)
        kind = DynamicMethod if name in self.package.document.dynamic else Method
        return kind(self, name, options, state, self._profile if profile is None else profile)

    def set_options(self, backend: str, **options: bool | int | float | str) -> None:
        """Change run-time options for methods that are loaded from now on."""
        checked = checked_options({backend: options}, self.backends)
        with self._lock:
            self._options.setdefault(backend, {}).update(checked[backend])

    def constant(self, index: int, host: Host) -> Any:
        """A constant as a tensor of the host's library; methods share it, and nothing is copied."""
        key = (index, type(host))
        with self._lock:
            if key not in self._constants:
                constant = self.package.document.constants[index]
                if constant.external:
                    data = self.package.external(constant)
                else:
                    data = self.package.view(constant.entry, SegmentInfo("constant", constant.entry))
                self._constants[key] = host.constant(data, constant.spec, constant.offset)
            return self._constants[key]

    @property
    def debug_info(self) -> doc.DebugInfo:
        """Debug handles and maps; read from the file when they are first needed, empty if they are damaged."""
        with self._lock:
            if self._debug is None:
                try:
                    self._debug = self.package.debug()
                except ProgramError:
                    self._debug = doc.DebugInfo()
            return self._debug

    def debug_map(self, method: str, index: int) -> Mapping[int | str, tuple[int, ...]]:
        """A delegate's own ids → debug handles."""
        found = self.debug_info.maps.get(method, [])
        return found[index] if index < len(found) else {}

    def delegate_data(self, method: str, index: int) -> bytes:
        """A delegate's bytes, such as the ``.pte`` inside that a phone runs."""
        delegates = self._described(method).delegates
        if not 0 <= index < len(delegates):
            raise MethodError(f"method {method!r} has {len(delegates)} delegates", code=ErrorCode.NOT_FOUND)
        entry = delegates[index].entry
        return bytes(self.package.view(entry, SegmentInfo("delegate", entry, delegates[index].backend)))


def load(
    source: Source,
    *,
    verification: Verification = "full",
    backend_options: Mapping[str, Options] | None = None,
    external_data: Mapping[str, str | os.PathLike[str]] | None = None,
    registry: Registry | None = None,
    profile: bool = False,
) -> Program:
    """Open a program: a path (memory-mapped), bytes, a file open for reading bytes, or a :class:`DataLoader`.

    ``verification="full"`` compares every checksum before anything is used; ``"header"`` only those of the document.
    ``backend_options`` are run-time options by backend; ``external_data`` says where files with weights lie, if not
    beside the program. ``profile`` records what happens, for :meth:`Method.profile`.
    Raises :class:`ProgramError` for a file that is not whole, and :class:`MethodError` for wrong options.
    """
    started = time.perf_counter()
    package = open_package(source, verification, external_data)
    event = Event("load", "program", started, time.perf_counter(), nbytes=package.size)
    return Program(package, registry, backend_options, profile, (event,))
