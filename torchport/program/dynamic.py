"""A method with sizes that change: looks at its inputs' sizes, pads them up to a variant's, takes the true results."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import ErrorCode, MethodError, TorchportError
from ..core.forks import guarded_rlock
from ..core.specs import contiguous_strides
from . import document as doc
from .delegate import Options, checked_options, find_backend
from .method import Method, State, positional
from .profile import Recorder
from .schema import Extent, extent_of, product_of, variant_name
from .values import host_for

if TYPE_CHECKING:
    from .program import Program

__all__ = ["DynamicMethod", "extent_name"]

_KNOWN: Final = 1024
"""Sets of sizes a method remembers what to do for."""


@dataclass(slots=True)
class _Call:
    """What to do for inputs of certain sizes. ``pads``: which inputs, how they are checked, what they become."""

    method: Method
    true: tuple[Any, ...]
    pads: list[tuple[int, Callable[[Any], Any], doc.Spec]]
    finish: Callable[[list[Any]], list[Any]] | None


def extent_name(extent: Extent, symbols: Sequence[doc.Symbol]) -> str:
    """A dimension in words, such as ``batch`` or ``2*batch+1``."""
    if isinstance(extent, int):
        return str(extent)
    at, multiple, offset = extent
    return (f"{multiple}*" if multiple != 1 else "") + symbols[at].name + (f"{offset:+d}" if offset else "")


class DynamicMethod(Method):
    """A :class:`Method` with sizes that change. Each variant is loaded when it is first needed, once.

    Where the sizes are a variant's own, nothing is copied.
    """

    def __init__(
        self, program: Program, name: str, options: Mapping[str, Options], state: State | None, profile: bool
    ) -> None:
        document = program.package.document
        self.name = name
        self._program = program
        self._dynamic = dynamic = document.dynamic[name]
        variants = [document.methods[one] for one in dynamic.names(name)]
        self._inputs = variants[0].inputs[: len(dynamic.inputs)]
        self._names = {one.name: position for position, one in enumerate(self._inputs)}
        self._sources: list[tuple[int, int]] = []
        self._extents: list[tuple[int, int, int]] = []
        for at, dims in enumerate(dynamic.inputs):
            for dim, extent in enumerate(dims or ()):
                if not isinstance(extent, int):
                    self._sources.append((at, dim))
                    self._extents.append(extent)
        self._axes = [sorted({sizes[at] for sizes in dynamic.variants}) for at in range(len(dynamic.symbols))]
        self._lock = guarded_rlock()
        self._loaded: dict[tuple[int, ...], Method] = {}
        self._calls: dict[Any, _Call] = {}
        self._active: Method | None = None
        self._closed = False
        self._recorder = Recorder(self._where) if profile else None
        if self._recorder is not None:
            self._recorder.events[:0] = program.load_events
        # One library for all variants: buffers' values go from one to another.
        used = dict.fromkeys(one.backend for method in variants for one in method.delegates)
        backends = [find_backend(program.registry, backend, name, 0) for backend in used]
        kernels = any(isinstance(one, doc.KernelRecord) for method in variants for one in method.instructions)
        self._host = host_for(kernels or any(not one.capabilities.torch_free for one in backends))
        self._options = {backend: dict[str, Any]() for backend in used}
        for backend, given in checked_options(options, program.backends).items():
            self._options.setdefault(backend, {}).update(given)
        self.state = State() if state is None else state
        for update in (one for method in variants for one in method.state):
            self.state._adopt(program, update.constant, program.constant(update.constant, self._host))

    # -- which variant -----------------------------------------------------------------------------------------------
    def _variant(self, sizes: tuple[int, ...]) -> Method:
        found = self._loaded.get(sizes)
        if found is None:
            name = variant_name(self.name, sizes)
            found = self._loaded[sizes] = Method(
                self._program, name, self._options, self.state, False, host=self._host, recorder=self._recorder
            )
        return found

    def _values(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The symbols' values. Raises :class:`MethodError` for inputs that none fit."""
        symbols = self._dynamic.symbols
        found: dict[int, tuple[int, str]] = {}
        for (at, dim), (symbol, multiple, offset) in zip(self._sources, self._extents, strict=True):
            who, known = f"input {self._inputs[at].name!r}", symbols[symbol]
            given: Any = getattr(inputs[at], "shape", None)
            rank = len(self._dynamic.inputs[at] or ())
            if given is None or len(given) != rank:
                shown = f"a {type(inputs[at]).__name__}" if given is None else f"{list(given)}"
                raise MethodError(
                    f"{who} should be {self._program.meta(self.name).inputs[at]}, but is {shown}; convert it",
                    code=ErrorCode.INVALID_TYPE if given is None else ErrorCode.INVALID_ARGUMENT,
                )
            size, rest = divmod(given[dim] - offset, multiple)
            text = extent_name((symbol, multiple, offset), symbols)
            if rest or not known.least <= size <= known.most:
                raise MethodError(
                    f"{who}: dimension {dim} ({text}) is {given[dim]}, but {known.name} is from {known.least} to "
                    f"{known.most}; lower the model for a larger range, or give inputs within it"
                )
            if found.setdefault(symbol, (size, who))[0] != size:
                other, where = found[symbol]
                raise MethodError(
                    f"{who}: dimension {dim} ({text}) is {given[dim]}, but {known.name} is {other} by {where}; give "
                    "inputs whose sizes agree"
                )
        return tuple(found[at][0] for at in range(len(symbols)))

    def _chosen(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the variant for these values."""
        dynamic = self._dynamic
        if dynamic.padded:
            return tuple(axis[bisect_left(axis, one)] for axis, one in zip(self._axes, values, strict=True))
        if values not in dynamic.variants:
            names = [one.name for one in dynamic.symbols]
            there = "; ".join(_shown(names, sizes) for sizes in sorted(dynamic.variants)[:16])
            raise MethodError(
                f"method {self.name!r} has no variant for {_shown(names, values)}, since inputs cannot be padded "
                f"({dynamic.reason}); there are: {there}; lower the model with this size among buckets="
            )
        return values

    def _new_call(self, key: Any, inputs: Sequence[Any]) -> _Call:
        """What to do for inputs of sizes that are met for the first time."""
        values = self._values(inputs)
        sizes = self._chosen(values)
        method = self._variant(sizes)
        described = method._method
        host, dynamic = self._host, self._dynamic
        pads: list[tuple[int, Callable[[Any], Any], doc.Spec]] = []
        for at, dims in enumerate(dynamic.inputs):
            spec = described.inputs[at].spec
            if dims is not None and spec is not None:
                shape = tuple(extent_of(dim, values) for dim in dims)
                if shape != spec.shape:
                    true = doc.Spec(spec.dtype, shape, contiguous_strides(shape))
                    pads.append((at, host.checker(f"input {self._inputs[at].name!r}", true), spec))
        numbers = tuple(host.number(value) for value in values) if dynamic.padded else ()
        call = _Call(method, numbers, pads, self._finisher(values, sizes))
        if len(self._calls) >= _KNOWN:
            self._calls.pop(next(iter(self._calls)))
        self._calls[key] = call
        return call

    def _finisher(self, values: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[list[Any]], list[Any]] | None:
        """Takes the true part of a padded variant's results; nothing where all of them are true."""
        if values == sizes:
            return None
        parts: list[tuple[int, tuple[int, ...] | None, tuple[slice, ...], tuple[int, ...]]] = []
        numbers: list[tuple[int, int]] = []
        for at, form in enumerate(self._dynamic.outputs):
            if form is not None and form.number is not None:
                numbers.append((at, product_of(form.number, values)))
            elif form is not None and form.dims is not None:
                dims = [dim or () for dim in form.dims]
                shape = tuple(product_of(dim, values) for dim in dims)
                factors = [factor for dim in dims for factor in dim or ((1, None),)]
                padded = tuple(number if symbol is None else sizes[symbol] for number, symbol in factors)
                true = tuple(number if symbol is None else values[symbol] for number, symbol in factors)
                if padded != true:
                    own = all(len(dim) <= 1 for dim in dims)
                    parts.append((at, None if own else padded, tuple(slice(size) for size in true), shape))
        part = self._host.part

        def finish(outputs: list[Any]) -> list[Any]:
            for at, factors, taken, shape in parts:
                outputs[at] = part(outputs[at], factors, taken, shape)
            for at, number in numbers:
                outputs[at] = number
            return outputs

        return finish if parts or numbers else None

    # -- running -----------------------------------------------------------------------------------------------------
    def _begin_call(self, inputs: Sequence[Any], named: Mapping[str, object]) -> Method:
        """Begin a run of the variant for these inputs."""
        if self._closed:
            raise MethodError(f"method {self.name!r} was closed", code=ErrorCode.INVALID_STATE)
        if self._active is not None:
            raise MethodError(
                f"method {self.name!r} is in progress; finish it with step(), or call reset()",
                code=ErrorCode.INVALID_STATE,
            )
        if named:
            inputs = positional(self.name, self._names, inputs, named)
        if len(inputs) != len(self._inputs):
            names = ", ".join(self._names)
            raise MethodError(f"method {self.name!r} takes {len(self._inputs)} inputs ({names}), but got {len(inputs)}")
        try:
            key = tuple([inputs[at].shape[dim] for at, dim in self._sources])
            call = self._calls.get(key)
        except (AttributeError, IndexError, TypeError):
            key = call = None
        if call is None:
            call = self._new_call(key, inputs)
        method, given = call.method, inputs
        if call.pads:
            inputs = list(inputs)
            for at, check, spec in call.pads:
                inputs[at] = self._host.pad(check(inputs[at]), spec)
        method._begin((*inputs, *call.true), {})
        method._given, method._finish = given, call.finish
        return method

    def __call__(self, *inputs: object, **named: object) -> tuple[Any, ...]:
        """Run the method. Raises as :class:`Method` does, and :class:`MethodError` for sizes out of range, sizes that
        do not agree with each other, and sizes there is no variant for."""
        started = time.perf_counter() if self._recorder is not None else 0.0
        with self._lock:
            return self._begin_call(inputs, named)._complete(started)

    def set_inputs(self, *inputs: object, **named: object) -> None:
        """Begin a run that :meth:`step` continues. Raises as calling does; an earlier unfinished run must be reset."""
        with self._lock:
            self._active = self._begin_call(inputs, named)

    def step(self) -> bool:
        """Run one instruction of the variant; true while there are more. Raises as :meth:`Method.step` does."""
        with self._lock:
            if self._active is None:
                raise MethodError("call set_inputs() first", code=ErrorCode.INVALID_STATE)
            return self._active.step()

    def outputs(self) -> tuple[Any, ...]:
        """The outputs of a run whose last step is done; buffers get their new values, and the run is over."""
        with self._lock:
            if self._active is None:
                raise MethodError("there are steps left to run", code=ErrorCode.INVALID_STATE)
            found = self._active.outputs()
            self._active = None
            return found

    def reset(self) -> None:
        """Give up an unfinished run. Buffers keep their values: see :meth:`State.reset`."""
        with self._lock:
            if self._active is not None:
                self._active.reset()
            self._active = None

    @property
    def in_progress(self) -> bool:
        """Whether a run was begun and not finished."""
        return self._active is not None

    # -- the rest ----------------------------------------------------------------------------------------------------
    def set_options(self, backend: str, **options: bool | int | float | str) -> None:
        """Change run-time options from the next execution on. Raises as loading with wrong options does."""
        checked = checked_options({backend: options}, list(self._options))
        with self._lock:
            self._options[backend].update(checked[backend])
            for method in self._loaded.values():
                if backend in method._options:
                    method.set_options(backend, **options)

    def close(self) -> None:
        """Destroy the delegates of every variant that was loaded. Safe to call more than once.

        Raises the first error of a backend's ``destroy``, after all have been destroyed.
        """
        with self._lock:
            self.reset()
            self._closed = True
            self._calls.clear()
            failed: list[TorchportError] = []
            while self._loaded:
                _, method = self._loaded.popitem()
                try:
                    method.close()
                except TorchportError as error:
                    failed.append(error)
        if failed:
            raise failed[0]


def _shown(names: Sequence[str], sizes: Sequence[int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
