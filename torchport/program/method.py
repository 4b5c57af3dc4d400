"""A loaded method: checks inputs, runs delegates and leftover operators one after the other, keeps buffers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..backend.interface import FreeableBuffer, TemporaryMemory
from ..core.errors import DelegateError, ErrorCode, MethodError, TorchportError
from ..core.forks import guarded_rlock
from . import document as doc
from .delegate import LoadedDelegate, Options, checked_options, find_backend, locate
from .loader import SegmentInfo
from .profile import Profile, Recorder
from .values import Host, check_literal, host_for

if TYPE_CHECKING:
    from .program import MethodMeta, Program

__all__ = ["Method", "State", "positional"]

Env = list[Any]
Step = Callable[[Env], None]


def _operators() -> Any:
    """How operators that no delegate took are run: imported where there are some, since that imports PyTorch."""
    from . import operators  # on demand: it imports PyTorch

    return operators


class State:
    """Values of a program's mutable buffers, by name. Methods of one program that share it see each other's changes.

    A call that fails changes nothing. Not for use by several methods at the same time.
    """

    def __init__(self) -> None:
        self._initial: dict[int, Any] = {}
        self._values: dict[int, Any] = {}
        self._names: dict[str, int] = {}
        self._program: Program | None = None

    def _adopt(self, program: Program, number: int, value: Any) -> None:
        if self._program is not None and self._program is not program:
            raise MethodError("a state belongs to one program; share it between that program's methods")
        self._program = program
        self._names.setdefault(program.package.document.constants[number].name, number)
        self._initial.setdefault(number, value)
        self._values.setdefault(number, value)

    def reset(self) -> None:
        """Give every buffer the value it has in the file."""
        self._values.update(self._initial)

    def __getitem__(self, name: str) -> Any:
        """A copy of a buffer's value."""
        value = self._values[self._names[name]]
        return value.clone() if hasattr(value, "clone") else value.copy()

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._values)


def _release(delegates: list[LoadedDelegate]) -> list[BaseException]:
    """Destroy delegates in the order of their indices; every one, whatever the others do."""
    failed: list[BaseException] = []
    while delegates:
        try:
            delegates.pop(0).destroy()
        except Exception as error:
            failed.append(error)
    return failed


class Method:
    """One entry point of a program, ready to run: ``method(*inputs)`` returns a tuple of outputs.

    Inputs and outputs are CPU tensors of PyTorch, or NumPy arrays if all inputs are; inputs may also be given by name.
    One thread at a time runs a method: others wait. Several methods of one program, also of one name, run side by side.
    Made by :meth:`Program.load_method`; :meth:`close`, a ``with`` block or garbage collection destroys its delegates.
    """

    def __init__(
        self,
        program: Program,
        name: str,
        options: Mapping[str, Options],
        state: State | None,
        profile: bool,
        *,
        host: Host | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``host`` and ``recorder`` are those of the method that this one is a variant of."""
        self.name = name
        self._shared_host = host
        self._method = program.package.document.methods[name]
        self._program = program
        self._names = {one.name: position for position, one in enumerate(self._method.inputs)}
        self._lock = guarded_rlock()
        self._delegates: list[LoadedDelegate] = []
        self._env: Env = []
        self._at: int | None = None
        self._closed = False
        self._given: Sequence[object] = ()
        self._temporary = TemporaryMemory()
        self._recorder = recorder if recorder is not None else Recorder(self._where) if profile else None
        self._finish: Callable[[list[Any]], list[Any]] | None = None
        self.state = State() if state is None else state
        self._options = {delegate.backend: dict[str, Any]() for delegate in self._method.delegates}
        for backend, given in checked_options(options, program.backends).items():
            self._options.setdefault(backend, {}).update(given)
        started = time.perf_counter()
        try:
            self._load()
        except BaseException:
            _release(self._delegates)
            raise
        if self._recorder is not None:
            if recorder is None:
                self._recorder.events[:0] = program.load_events
            self._recorder.add("load", f"method {name}", started, time.perf_counter())

    # -- loading ---------------------------------------------------------------------------------------------------
    def _load(self) -> None:
        """Backends first, all of them; then init in the order of the indices; then the leftover operators."""
        method, program = self._method, self._program
        backends = [
            find_backend(program.registry, delegate.backend, self.name, index)
            for index, delegate in enumerate(method.delegates)
        ]
        kernels = [one for one in method.instructions if isinstance(one, doc.KernelRecord)]
        self._host = self._shared_host or host_for(
            bool(kernels) or any(not one.capabilities.torch_free for one in backends)
        )
        self._initial: Env = [None] * method.values
        for number, constant in method.constants.items():
            self._initial[number] = program.constant(constant, self._host)
        for update in method.state:
            self.state._adopt(program, update.constant, self._initial[update.value])
        for index, backend in enumerate(backends):
            self._delegates.append(self._init(index, backend))
        self._checks = [
            None if one.spec is None else self._host.checker(f"input {one.name!r}", one.spec) for one in method.inputs
        ]
        self._steps = self._plan()

    def _init(self, index: int, backend: Any) -> LoadedDelegate:
        delegate, program = self._method.delegates[index], self._program
        view = program.package.view
        segment = SegmentInfo("delegate", delegate.entry, delegate.backend)
        named = {
            key: view(entry, SegmentInfo("named_data", entry, delegate.backend))
            for key, entry in delegate.named_data.items()
        }
        started = time.perf_counter()
        loaded = LoadedDelegate(
            index,
            delegate,
            backend,
            method=self.name,
            host=self._host,
            buffer=FreeableBuffer(view(delegate.entry, segment)),
            constants={at: program.constant(which, self._host) for at, which in delegate.constants.items()},
            named_data=named,
            options=self._options[delegate.backend],
            debug_map=lambda: program.debug_map(self.name, index),
            where=self._where,
            recorder=self._recorder,
            temporary=self._temporary,
        )
        if self._recorder is not None:
            self._recorder.add("init", loaded.name, started, time.perf_counter(), backend=backend.name)
        return loaded

    def _where(self, handles: Sequence[int]) -> doc.Origin:
        """Where debug handles come from: what all of them share."""
        known = self._program.debug_info.handles
        found = {known[handle] for handle in handles if handle in known}
        if len(found) == 1:
            return found.pop()

        def shared(field: str) -> str:
            values = {getattr(place, field) for place in found}
            return values.pop() if len(values) == 1 else ""

        return doc.Origin(*map(shared, ("module", "source", "op", "hierarchy", "stack")))

    # -- the plan: what is decided once --------------------------------------------------------------------------------
    def _plan(self) -> list[Step]:
        method = self._method
        home: dict[int, LoadedDelegate] = {}
        last = self._last_uses()
        steps: list[Step] = []
        for position, instruction in enumerate(method.instructions):
            if isinstance(instruction, doc.CallRecord):
                step = self._plan_call(instruction, home)
                home.update((number, self._delegates[instruction.delegate]) for number in instruction.results)
            else:
                step = self._plan_kernel(instruction, home)
            steps.append(_freeing(step, last.get(position, ())))
        self._take = self._plan_outputs(home)
        return steps

    def _last_uses(self) -> dict[int, tuple[int, ...]]:
        """For each instruction the values that nobody reads after it: their memory is released there."""
        method = self._method
        kept = {output.value for output in method.outputs} | {one.result for one in method.state}
        kept |= method.constants.keys()
        last: dict[int, int] = {}
        for position, instruction in enumerate(method.instructions):
            for number in (*_reads(instruction), *(one for one in instruction.results if one is not None)):
                if number not in kept:
                    last[number] = position
        found: dict[int, list[int]] = {}
        for number, position in last.items():
            found.setdefault(position, []).append(number)
        return {position: tuple(numbers) for position, numbers in found.items()}

    def _plan_call(self, call: doc.CallRecord, home: Mapping[int, LoadedDelegate]) -> Step:
        delegate = self._delegates[call.delegate]
        described = self._method.delegates[call.delegate]
        passed: dict[int, Any] = dict(delegate.passed)
        numbers = iter(call.args)
        getters: list[Callable[[Env], Any]] = []
        trusted = self._trusted()
        for position, spec in enumerate(described.inputs):
            if position in described.constants:
                if position in passed:
                    getters.append(_always(passed[position]))
                continue
            number = next(numbers)
            producer = home.get(number)
            if producer is not None and producer.backend is delegate.backend:
                getters.append(_at(number))
                continue
            check = self._host.checker(f"argument {position} of delegate {delegate.name}", spec)
            if number in trusted and trusted[number] == spec:
                check = None
            unwrap = None if producer is None else producer.adapter.unwrap
            getters.append(_wrapped(number, unwrap, check, delegate.adapter.wrap, delegate.inputs[position]))
        results = call.results
        execute = delegate.execute

        def step(env: Env) -> None:
            values = execute([get(env) for get in getters])
            for number, value in zip(results, values, strict=True):
                env[number] = value

        return step

    def _trusted(self) -> dict[int, doc.Spec]:
        """Values whose specs are known to hold: inputs, which were checked, and constants."""
        method = self._method
        constants = self._program.package.document.constants
        tensors = [one.spec for one in method.inputs if one.spec is not None]
        changed = {update.value for update in method.state}
        known = {number: constants[which].spec for number, which in method.constants.items() if number not in changed}
        return dict(enumerate(tensors)) | known

    def _plan_kernel(self, kernel: doc.KernelRecord, home: Mapping[int, LoadedDelegate]) -> Step:
        handles = (kernel.handle,)
        try:
            run = _operators().bind(kernel)
        except DelegateError as error:
            raise locate(error, self.name, kernel.op, handles, self._where) from error
        foreign = [(number, home[number].adapter.unwrap) for number in set(_reads(kernel)) if number in home]
        recorder = self._recorder

        def call(env: Env) -> Any:
            if not foreign:
                return run(env)
            local = list(env)
            for number, unwrap in foreign:
                local[number] = unwrap(env[number])
            return run(local)

        def step(env: Env) -> None:
            started = time.perf_counter() if recorder is not None else 0.0
            try:
                value = call(env)
                values = value if kernel.several else (value,)
                for number, one in zip(kernel.results, values, strict=True):
                    if number is not None:
                        env[number] = one
            except Exception as error:
                raise locate(error, self.name, kernel.op, handles, self._where) from error
            finally:
                if recorder is not None:
                    recorder.add("kernel", kernel.op, started, time.perf_counter(), handles=handles)

        return step

    def _plan_outputs(self, home: Mapping[int, LoadedDelegate]) -> Callable[[Env], tuple[list[Any], list[Any]]]:
        """A function that takes outputs and new buffer values from the values; nothing in it shares memory."""
        method = self._method
        shared = set(range(sum(one.spec is not None for one in method.inputs))) | method.constants.keys()
        getters: list[Callable[[Env], Any]] = []
        copy = self._host.copy

        def getter(number: int) -> Callable[[Env], Any]:
            unwrap = home[number].adapter.unwrap if number in home else None
            copied = number in shared
            shared.add(number)
            if unwrap is not None:
                return (lambda env: copy(unwrap(env[number]))) if copied else (lambda env: unwrap(env[number]))
            return (lambda env: copy(env[number])) if copied else _at(number)

        known = shared.copy()  # inputs were checked, and constants are as they are in the file

        def checked(number: int, what: str, spec: doc.Spec) -> Callable[[Env], Any]:
            if number in known:
                return getter(number)
            get, check = getter(number), self._host.result(what, spec)
            return lambda env: check(get(env))

        self._changed = [one for one in method.state if one.result != one.value]
        buffers = self._program.package.document.constants
        updates = [
            checked(one.result, f"buffer {buffers[one.constant].name!r}", buffers[one.constant].spec)
            for one in self._changed
        ]
        for position, output in enumerate(method.outputs):
            if output.value is None or output.spec is None:
                getters.append(_always(output.literal))
            else:
                getters.append(checked(output.value, f"output {position}", output.spec))
        return lambda env: ([get(env) for get in getters], [get(env) for get in updates])

    # -- running ---------------------------------------------------------------------------------------------------
    def __call__(self, *inputs: object, **named: object) -> tuple[Any, ...]:
        """Run the method. Raises :class:`MethodError` for wrong inputs or another call in progress on this method, and
        :class:`DelegateError` where something fails while it runs; afterwards the method can be called again."""
        recorder = self._recorder
        started = time.perf_counter() if recorder is not None else 0.0
        with self._lock:
            if self._at is not None:
                raise MethodError(
                    f"method {self.name!r} is in progress; finish it with step(), or call reset()",
                    code=ErrorCode.INVALID_STATE,
                )
            self._begin(inputs, named)
            return self._complete(started)

    def _complete(self, started: float = 0.0) -> tuple[Any, ...]:
        """The rest of a run that was begun."""
        try:
            with self._host.default_state():
                env = self._env
                for step in self._steps:
                    step(env)
                return self._end()
        finally:
            self._clear()
            if self._recorder is not None:
                self._recorder.add("execute", f"method {self.name}", started, time.perf_counter())

    def _begin(self, inputs: Sequence[object], named: Mapping[str, object]) -> None:
        if self._closed:
            raise MethodError(
                f"method {self.name!r} was closed; load it again with load_method()", code=ErrorCode.INVALID_STATE
            )
        if named:
            inputs = positional(self.name, self._names, inputs, named)
        method = self._method
        if len(inputs) != len(method.inputs):
            names = ", ".join(one.name for one in method.inputs)
            raise MethodError(
                f"method {self.name!r} takes {len(method.inputs)} inputs ({names}), but got {len(inputs)}"
            )
        env = self._initial.copy()
        number = 0
        for position, check in enumerate(self._checks):
            if check is None:
                check_literal(method.inputs[position], inputs[position])
            else:
                env[number] = check(inputs[position])
                number += 1
        for update in method.state:
            env[update.value] = self.state._values[update.constant]
        self._temporary.reset()
        self._env, self._at, self._given = env, 0, inputs

    def _end(self) -> tuple[Any, ...]:
        outputs, updates = self._take(self._env)
        if self._finish is not None:
            outputs = self._finish(outputs)
        specs = [output.spec for output in self._method.outputs]
        results = self._host.results(outputs, specs, self._given)
        # Nothing can fail from here on: buffers change all together, or not at all.
        for update, value in zip(self._changed, updates, strict=True):
            self.state._values[update.constant] = value
        return results

    def _clear(self) -> None:
        self._env, self._at, self._given, self._finish = [], None, (), None
        self._temporary.reset()

    # -- step by step ------------------------------------------------------------------------------------------------
    def set_inputs(self, *inputs: object, **named: object) -> None:
        """Begin a run that :meth:`step` continues. Raises as calling does; an earlier unfinished run must be reset."""
        with self._lock:
            if self._at is not None:
                raise MethodError(f"method {self.name!r} is in progress", code=ErrorCode.INVALID_STATE)
            self._begin(inputs, named)

    def step(self) -> bool:
        """Run one instruction; true while there are more. After an error the same instruction may be tried again.

        Raises :class:`MethodError`: ``INVALID_STATE`` before :meth:`set_inputs`, ``END_OF_METHOD`` after the last.
        """
        with self._lock:
            if self._at is None:
                raise MethodError("call set_inputs() first", code=ErrorCode.INVALID_STATE)
            if self._at >= len(self._steps):
                raise MethodError(f"method {self.name!r} is at its end", code=ErrorCode.END_OF_METHOD)
            step, env = self._steps[self._at], self._env
            with self._host.default_state():
                step(env)
            self._at += 1
            return self._at < len(self._steps)

    def outputs(self) -> tuple[Any, ...]:
        """The outputs of a run whose last step is done; buffers get their new values, and the run is over."""
        with self._lock:
            if self._at is None or self._at < len(self._steps):
                raise MethodError("there are steps left to run", code=ErrorCode.INVALID_STATE)
            with self._host.default_state():
                found = self._end()
            self._clear()
            return found

    def reset(self) -> None:
        """Give up an unfinished run. Buffers keep their values: see :meth:`State.reset`."""
        with self._lock:
            self._clear()

    @property
    def in_progress(self) -> bool:
        """Whether a run was begun and not finished."""
        return self._at is not None

    # -- the rest ----------------------------------------------------------------------------------------------------
    @property
    def meta(self) -> MethodMeta:
        """Inputs, outputs, delegates, sizes."""
        return self._program.meta(self.name)

    def set_options(self, backend: str, **options: bool | int | float | str) -> None:
        """Change run-time options from the next execution on. Raises as loading with wrong options does."""
        checked = checked_options({backend: options}, list(self._options))
        with self._lock:
            self._options[backend].update(checked[backend])

    def profile(self) -> Profile:
        """Everything recorded so far. Raises :class:`MethodError` unless it was loaded with ``profile=True``."""
        if self._recorder is None:
            raise MethodError("nothing was recorded; load the method with profile=True", code=ErrorCode.INVALID_STATE)
        return Profile(self._recorder.events, self._recorder.values)

    def close(self) -> None:
        """Destroy the delegates, in the order of their indices. Safe to call more than once.

        Raises the first error of a backend's ``destroy``, after all have been destroyed.
        """
        with self._lock:
            self._closed = True
            self._clear()
            failed = _release(self._delegates)
        if failed:
            raise TorchportError(f"a delegate of method {self.name!r} failed to close: {failed[0]}") from failed[0]

    def __enter__(self) -> Method:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_delegates"):
            _release(self._delegates)


def positional(
    method: str, names: Mapping[str, int], inputs: Sequence[object], named: Mapping[str, object]
) -> Sequence[object]:
    """All inputs in order. Raises :class:`MethodError` for one that is missing, given twice or unknown."""
    missing = object()
    filled: list[object] = [*inputs, *[missing] * (len(names) - len(inputs))]
    for name, value in named.items():
        position = names.get(name)
        if position is None or position < len(inputs):
            why = "is given twice" if position is not None else f"is none of: {', '.join(names)}"
            raise MethodError(f"input {name!r} of method {method!r} {why}")
        filled[position] = value
    absent = [name for name, position in names.items() if filled[position] is missing]
    if absent:
        raise MethodError(f"method {method!r} misses inputs: {', '.join(absent)}")
    return filled


def _reads(instruction: doc.Instruction) -> list[int]:
    """The numbers of the values an instruction reads."""
    if isinstance(instruction, doc.CallRecord):
        return list(instruction.args)
    found: list[int] = []
    pending: list[Any] = [list(instruction.args), list(instruction.kwargs.values())]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict) and "n" in value:
            found.append(value["n"])
    return found


def _at(number: int) -> Callable[[Env], Any]:
    return lambda env: env[number]


def _always(value: Any) -> Callable[[Env], Any]:
    return lambda env: value


def _wrapped(
    number: int,
    unwrap: Callable[[Any], Any] | None,
    check: Callable[[Any], Any] | None,
    wrap: Callable[[Any, Any], Any],
    spec: Any,
) -> Callable[[Env], Any]:
    """A value as a delegate takes it: out of its producer's form, compared with the spec, put into the delegate's."""
    if unwrap is None and check is None:
        return lambda env: wrap(env[number], spec)

    def get(env: Env) -> Any:
        value = env[number]
        if unwrap is not None:
            value = unwrap(value)
        return wrap(value if check is None else check(value), spec)

    return get


def _freeing(step: Step, numbers: tuple[int, ...]) -> Step:
    """A step that lets go of values nobody reads after it, once it has succeeded."""
    if not numbers:
        return step

    def run(env: Env) -> None:
        step(env)
        for number in numbers:
            env[number] = None

    return run
