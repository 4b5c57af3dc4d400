"""Random programs of views and writes: on tensors that share memory, in functions that torch.compile can take.

A program is a few lines of Python text, so that it can be shortened line by line and printed. The lines are tried on
the CPU while they are drawn; what PyTorch refuses there is left out.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

N = "n"
"""A size that changes from run to run."""
SIZES = (4, 6)
SHAPES: tuple[tuple[Any, ...], ...] = ((4,), (2, 3), (3, 3), (4, 4), (2, 3, 2), (8,), (4, 2), (1, 4), ())
CHANGING: tuple[tuple[Any, ...], ...] = ((N,), (N, N), (N, 3), (2, N), (N, 2, 2), (2, N, 3))
FLOAT, INT, BOOL, COMPLEX = "torch.float32", "torch.int64", "torch.bool", "torch.complex64"
DTYPES = (FLOAT,) * 10 + (INT, INT, BOOL, COMPLEX, COMPLEX, "torch.float64", "torch.float64")

VIEWS = (
    "{x}.t()", "{x}.transpose(0, -1)", "{x}.permute({perm})", "{x}.view(-1)", "{x}.view({x}.shape)", "{x}.reshape(-1)",
    "{x}.reshape(2, -1)", "{x}.view(-1, 2)", "{x}.expand(2, *{x}.shape)", "{x}.expand_as({x})", "{x}[1:]", "{x}[:-1]",
    "{x}[::2]", "{x}[..., 1::2]", "{x}[:, :]", "{x}[:]", "{x}[...]", "{x}[0]", "{x}[-1]", "{x}[..., 0]", "{x}[None]",
    "{x}[:, 1]", "{x}[1:, :2]", "{x}.select(-1, 1)", "{x}.narrow(0, 1, 1)", "{x}.narrow(-1, 0, 2)", "{x}.unsqueeze(0)",
    "{x}.unsqueeze(-1)", "{x}.squeeze()", "{x}.squeeze(0)", "{x}.diagonal()", "torch.diagonal({x}, 1)",
    "{x}.unfold(0, 2, 2)", "{x}.unfold(-1, 2, 1)", "{x}.as_strided((2,), (1,), 0)", "{x}.as_strided((2, 2), (2, 1), 0)",
    "{x}.chunk(2)[0]", "{x}.chunk(2, -1)[-1]", "{x}.split(2)[0]",
    "{x}.split(1, -1)[1]", "{x}.unbind()[0]", "{x}.unbind(-1)[-1]", "{x}.tensor_split(2)[1]", "{x}.flatten()",
    "{x}.flatten(0, 1)", "{x}.unflatten(0, (2, -1))", "{x}.movedim(0, -1)", "{x}.swapaxes(0, -1)", "{x}.mT", "{x}.T",
    "{x}.detach()", "{x}.data", "{x}.contiguous()", "{x}.view_as({x})", "{x}.reshape_as({x})", "{x}.ravel()",
    "torch.atleast_2d({x})", "torch.broadcast_to({x}, (2, *{x}.shape))", "{x}.to({x}.dtype)", "{x}.positive()",
    "{x}.view(torch.int32)", "{x}.view(torch.float32)", "torch.view_as_real({x})", "torch.view_as_complex({x})",
    "{x}.real", "{x}.imag", "{x}.conj()", "{x}.resolve_conj()", "{x}.alias()", "{x}.t()[1:]", "{x}.t().t()",
    "{x}.unsqueeze(0).squeeze(0)", "{x}.view({x}.dtype)", "{x}.requires_grad_(False) if not {x}.requires_grad else {x}",
)  # fmt: skip
"""Expressions that show memory of ``x``, or may: some copy where the strides do not allow it."""

NEW = (
    "{x} * 2", "{x} + {y}", "{x} * {y}", "{x}.clone()", "{x}.clone().t()", "torch.cat([{x}, {x}])", "{x}.neg()",
    "torch.stack([{x}, {x}])", "torch.where({x} == {y}, {x}, {y})", "{x}.sum()", "{x}.sum(0)", "{x} == {y}",
    "torch.empty_like({x}).copy_({y})", "torch.zeros_like({x})", "torch.ones_like({x})", "{x}.flip(0)",
    "{x}.to(torch.float64)", "{x}.float()", "{x}.index_select(0, torch.tensor([1, 0], device={x}.device))",
    "{x}[torch.tensor([1, 0], device={x}.device)]", "{x}.roll(1)", "{x}.tril()",
    "torch.zeros({x}.shape, device={x}.device)",
    "{x}.masked_fill({x} == 1, 2)", "{x}.new_zeros({x}.shape)", "torch.empty({x}.shape, device={x}.device).copy_({x})",
    "{x}.repeat(2)", "torch.slice_scatter({x}, {y}[1:], 0, 1)", "torch.select_scatter({x}, {y}[0], 0, 0)",
    "({x} + 0).view(-1)", "({x} * 1).expand(2, *{x}.shape)", "{x}.cumsum(0)", "{x}.abs()", "{x}.copy_({y}).clone()",
    "torch.diagonal_scatter({x}, {y}.diagonal() * 2)", "{x}.sin()",
    "torch.empty_like({x}).copy_({y}).t()", "{x}.type_as({y})",
)  # fmt: skip
"""Expressions with memory of their own, most of them."""

WRITES = (
    "{x}.mul_(2)", "{x}.add_(1)", "{x}.add_({y})", "{x}.mul_({y})", "{x}.copy_({y})", "{x}.copy_({y})", "{x}[:] = {y}",
    "{x}[:] = {y}", "{x}[...] = {y}.t()", "{x}.copy_({y}.t())", "{x}[0] = 5", "{x}[0] = {y}[0]",
    "{x}[..., 1] = {y}[..., 0]",
    "{x}[1:] = {y}[1:]", "{x}[::2] = 3", "{x}.fill_(4)", "{x}.zero_()", "{x}[{x} == 1] = 7", "{x}.neg_()",
    "{x}.masked_fill_({x} == 2, 6)", "{x}.masked_fill_({y} == 0, 1)", "{x} += {y}", "{x} *= 2", "{x}.sub_(1)",
    "{x}.index_put_((torch.tensor([0], device={x}.device),), {y}[:1])",
    "{x}.scatter_(0, torch.zeros_like({x}, dtype=torch.int64), 3)",
    "{x}.index_add_(0, torch.tensor([0], device={x}.device), {y}[:1])",
    "{x}.index_fill_(0, torch.tensor([0], device={x}.device), 2)",
    "{x}.index_copy_(0, torch.tensor([0], device={x}.device), {y}[:1])", "{x}.addcmul_({y}, {y})", "{x}.clamp_(-2, 2)",
    "torch.add({y}, 1, out={x})", "torch.mul({y}, {y}, out={x})", "torch._foreach_add_([{x}], 1)",
    "torch._foreach_mul_([{x}], 2)", "torch._foreach_copy_([{x}], [{y}])", "{x}.data.mul_(2)", "{x}.data.copy_({y})",
    "{x}.detach().add_(1)", "{x}.t()[:] = {y}", "{x}.view(-1)[1:] = 2", "{x}.flatten().add_(1)", "{x}.t_()",
    "{x}.unsqueeze_(0)", "{x}.transpose_(0, -1)", "{x}.squeeze_()", "{x}.diagonal().fill_(3)", "{x}.lerp_({y}, 0.5)",
    "{x}.swapaxes_(0, -1)", "{x}.set_({y}.clone())", "{x}.data = {y}.clone()", "{x}.logical_not_()",
    "{x}.bitwise_xor_({y})",
    "torch.neg({y}, out={x})", "{x}.real.mul_(2)", "{x}.fill_diagonal_(2)",
    "{x}.put_(torch.tensor([0], device={x}.device), {y}.reshape(-1)[:1])",
    "{x}.masked_scatter_({x} == 1, {y}.clone())", "torch.cat([{y}, {y}], out={x})", "{x}.where({x} == 1, {y}, out={x})",
    "{x}.exponential_ if False else {x}.round_()", "{x}.floor_()", "{x}.pow_(2)", "{x}.copy_(1.5)",
    "{x}.resize_as_({y})", "torch.stack([{y}, {y}], out={x})",
)  # fmt: skip

READ_ONLY = ("unfold", "as_strided")
"""Views that programs do not write through, nor through what they make of them.

``unfold``: torch.compile and the device refuse a write through it. ``as_strided``: functionalization, which both
share, refuses a write where another view was taken before or after it. A write through a view of bools as another
dtype is left out where a bool then holds something else than 0 or 1: no C++ compiler promises what it is.
``storage_offset()`` is 0 on the device, so no program asks for it.
"""
_IN_PLACE_SHAPE = (
    "Dynamo ends a graph where the shape of an input is changed in place: what was one object before, such as x and "
    "x.float(), is two afterwards"
)
LEFT_OUT = {
    **dict.fromkeys(
        ("{x}.t_()", "{x}.unsqueeze_(0)", "{x}.transpose_(0, -1)", "{x}.squeeze_()", "{x}.swapaxes_(0, -1)"),
        _IN_PLACE_SHAPE,
    ),
    "{x}.data = {y}.clone()": "refused by torch.compile: AOTAutograd loses writes and views by it",
    "{x}.set_({y}.clone())": "set_ is not among the writes that the device promises",
    "{x}.resize_as_({y})": "resize_ is not among the writes that the device promises",
    "{x}.where({x} == 1, {y}, out={x})": "no such overload",
}
"""Writes that programs do not hold, and why."""


_numbers = itertools.count()


@dataclass(frozen=True)
class Base:
    """Memory: ``grad`` is ``""``, ``"leaf"``, or ``"made"`` for the result of an operator on a leaf."""

    shape: tuple[Any, ...]
    dtype: str
    grad: str

    def values(self, n: int, seed: int) -> torch.Tensor:
        """Small whole numbers, so that sums and products are exact."""
        shape = [n if size == N else size for size in self.shape]
        drawn = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
        dtype: torch.dtype = eval(self.dtype)
        return torch.complex(drawn.float(), drawn.flip(0).float()) if dtype.is_complex else drawn.to(dtype)


@dataclass(frozen=True)
class Holder:
    """A name that the program starts with: ``kind`` is ``"argument"``, ``"buffer"``, ``"parameter"`` or ``"closure"``;
    ``view`` is of the base called ``x``."""

    name: str
    kind: str
    base: int
    view: str


@dataclass(frozen=True)
class Program:
    """What :func:`draw` makes. ``runs``: the sizes and seeds of the calls, one after the other.

    ``apart``: the arguments of every second call share no memory.
    """

    bases: tuple[Base, ...]
    holders: tuple[Holder, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    runs: tuple[tuple[int, int], ...]
    dynamic: bool
    apart: bool = False

    def arguments(self) -> list[Holder]:
        """The holders that are given anew at each call."""
        return [holder for holder in self.holders if holder.kind == "argument"]

    def source(self) -> str:
        """The text of ``make(module, closures)``, which gives the function."""
        closures = [h.name for h in self.holders if h.kind == "closure"]
        held = [h.name for h in self.holders if h.kind in ("buffer", "parameter")]
        body = [
            *(f"{name} = module.{name}" for name in held),
            *self.lines,
            f"return ({''.join(f'{r}, ' for r in self.results)})",
        ]
        # What is assigned to would be a local variable of the function, and no closure.
        body = [*(f"{name} = {name}_" for name in closures), *body]
        inner = [f"def program({', '.join(h.name for h in self.arguments())}):", *(f"    {line}" for line in body)]
        head = f"def make({', '.join(['module', *(f'{name}_' for name in closures)])}):"
        return "\n".join([head, *(f"    {line}" for line in inner), "    return program", ""])


class State:
    """The tensors of one program on one device. What is no argument stays from run to run."""

    def __init__(self, program: Program, device: str) -> None:
        self.program = program
        self.device = device
        self.bases: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.lasting = {h.base for h in program.holders if h.kind != "argument"}
        self.module = nn.Module()
        self.closures: list[torch.Tensor] = []
        n, seed = program.runs[0]
        for at in sorted(self.lasting):
            self._base(at, n, seed)
        for holder in program.holders:
            if holder.kind == "buffer":
                self.module.register_buffer(holder.name, self.view(holder))
            elif holder.kind == "parameter":
                self.module.register_parameter(holder.name, self.bases[holder.base])  # type: ignore[arg-type]
            elif holder.kind == "closure":
                self.closures.append(self.view(holder))

    def _base(self, at: int, n: int, seed: int) -> None:
        base = self.program.bases[at]
        made = base.values(n, 10 * seed + at).to(self.device)
        made = made.clone() if self.device == "cpu" else made
        if base.grad:
            kind = nn.Parameter if any(h.base == at and h.kind == "parameter" for h in self.program.holders) else None
            made = kind(made) if kind is not None else made.requires_grad_()
            self.leaves[at] = made
            if base.grad == "made":
                made = made * 1
        self.bases[at] = made

    def view(self, holder: Holder) -> torch.Tensor:
        """A holder's tensor."""
        return eval(holder.view, {"x": self.bases[holder.base], "torch": torch})

    def arguments(self, n: int, seed: int, apart: bool = False) -> list[torch.Tensor]:
        """New arguments for a run; ``apart``: those without gradients share no memory."""
        for at in range(len(self.program.bases)):
            if at not in self.lasting:
                self._base(at, n, seed)
        for leaf in self.leaves.values():
            leaf.grad = None
        given = [self.view(holder) for holder in self.program.arguments()]
        return [arg.clone() if apart and not arg.requires_grad else arg for arg in given]

    def function(self) -> Callable[..., Any]:
        """The program as a function of its arguments."""
        scope: dict[str, Any] = {"torch": torch}
        # Dynamo remembers by file and line which sizes have changed: each program is a file of its own.
        exec(compile(self.program.source(), f"<program {next(_numbers)}>", "exec"), scope)
        return scope["make"](self.module, *self.closures)


def places(tensor: torch.Tensor) -> torch.Tensor | None:
    """Where in its memory each element of a CPU tensor lies, in bytes; ``None`` if that cannot be said."""
    size = tensor.element_size()
    count = tensor.untyped_storage().nbytes() // size
    if tensor.storage_offset() * size + tensor.numel() > tensor.untyped_storage().nbytes():
        return None
    whole = torch.arange(count) * size
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


CROSSING: tuple[str, ...] = ("{x}[...] = {y}.t()", "{x}.copy_({y}.t())", "{x}.t()[:] = {y}")
"""Writes that read their source at other places than they write: what eager does where the two share memory depends on
the order of its loop (``x.t()[:] = x`` may or may not see what it has just written)."""


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a CPU tensor are one place in memory."""
    found = places(tensor.detach())
    return found is None or found.unique().numel() != found.numel()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors are in one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def partly_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors share some places, but not each its own: what eager does then is nobody's promise."""
    if not share_memory(one, other) or not one.numel() or not other.numel():
        return False
    if (one.shape, one.stride(), one.storage_offset(), one.dtype) == (
        other.shape, other.stride(), other.storage_offset(), other.dtype,
    ):  # fmt: skip
        return False
    first, second = places(one.detach()), places(other.detach())
    if first is None or second is None:
        return True
    size = max(one.element_size(), other.element_size())
    return bool(torch.isin((first // size).reshape(-1), (second // size).reshape(-1)).any())


@dataclass
class _Drawing:
    """A program in the making, with what its lines so far have made on the CPU for each size."""

    draw: random.Random
    start: Callable[[], list[dict[str, Any]]]
    """What there is before the first line, made anew."""
    scopes: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    read_only: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.again()

    def again(self) -> None:
        """Run the lines so far on new tensors: a line that is left out may have written some of what it writes."""
        self.scopes = self.start()
        for scope, line in itertools.product(self.scopes, self.lines):
            exec(line, {"torch": torch}, scope)

    def tensors(self) -> list[str]:
        """The names of tensors that there are for each size."""
        return [
            name
            for name, value in self.scopes[0].items()
            if isinstance(value, torch.Tensor) and all(name in scope for scope in self.scopes)
        ]

    def attempt(self, line: str, target: str | None, sources: Sequence[str], apart: bool = False) -> bool:
        """Add a line if it is fine for each size; ``apart``: only if the target shares no memory with the sources."""
        if not self._may_write(line, target, sources, apart):
            return False
        known = set(self.scopes[0])
        if not all(self._run(line, target, scope) for scope in self.scopes):
            if target is not None:
                self.again()
            for scope in self.scopes:
                for name in set(scope) - known:
                    del scope[name]
            return False
        self.lines.append(line)
        return True

    def _may_write(self, line: str, target: str | None, sources: Sequence[str], apart: bool) -> bool:
        if target is None:
            return True
        if target in self.read_only:
            return False
        for scope in self.scopes:
            written = scope[target]
            if overlaps_itself(written):
                return False
            # In torch.compile, autograd takes what a list's operator wrote to a view for the value before.
            if "_foreach" in line and written.requires_grad:
                return False
            # There it is made of ``as_strided`` at the tensor's offset, which a new value of the tensor has not.
            if "fill_diagonal_" in line and written.storage_offset():
                return False
            if any(name != target and partly_overlap(written, scope[name]) for name in sources):
                return False
            if apart and any(share_memory(written, scope[name]) for name in sources):
                return False
        return True

    def _run(self, line: str, target: str | None, scope: dict[str, Any], count: int = 64) -> bool:
        out = scope[target] if target is not None and "out=" in line else None
        shape = None if out is None else out.shape
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an ``out=`` of another size: deprecated
                exec(line, {"torch": torch}, scope)
        except Exception:
            return False
        # Without a warning, ``out=`` gives a tensor without elements another size: a ``resize_``, which is left out.
        if out is not None and out.shape != shape:
            return False
        if any(isinstance(value, torch.Tensor) and holds_no_bool(value) for value in scope.values()):
            return False
        last = list(scope.values())[-1]
        return not (isinstance(last, torch.Tensor) and last.numel() > count)

    def drop(self) -> None:
        """Leave out the last line after all."""
        del self.lines[-1]
        self.again()

    def differentiable(self, x: str, made: str) -> bool:
        """Whether what ``as_strided`` made lies in what the tensor shows of its memory, where there are gradients.

        PyTorch's formula has no gradients for other elements, which are the base's and not the tensor's.
        """
        for scope in self.scopes:
            if not scope[x].requires_grad:
                continue
            whole, part = places(scope[x].detach()), places(scope[made].detach())
            if whole is None or part is None or not bool(torch.isin(part.reshape(-1), whole.reshape(-1)).all()):
                return False
        return True


def _holders(draw: random.Random, bases: list[Base]) -> list[Holder]:
    found: list[Holder] = []
    count = draw.randint(2, 4)
    for at in range(count):
        base = draw.randrange(len(bases))
        changes = N in bases[base].shape
        kind = draw.choices(("argument", "buffer", "parameter", "closure"), (12, 2, 2, 1))[0]
        whole = bases[base].grad == "leaf" or draw.random() < 0.4
        if changes or (kind == "parameter" and (bases[base].grad != "leaf")):
            kind = "argument"
        view = "x" if whole or kind == "parameter" else draw.choice(VIEWS[:-1]).format(x="x", perm="1, 0")
        found.append(Holder(f"{kind[0]}{at}", kind, base, view))
    if all(h.kind != "argument" for h in found):
        found.append(Holder("a9", "argument", found[0].base, "x"))
    # A base held by what lasts is a parameter's as a whole or nobody's.
    owned = {h.base for h in found if h.kind == "parameter"}
    return [h if h.base not in owned or h.view == "x" else Holder(h.name, h.kind, h.base, "x") for h in found]


def read_only(view: str) -> bool:
    """Whether programs do not write through this view."""
    return any(name in view for name in READ_ONLY)


def holds_no_bool(tensor: torch.Tensor) -> bool:
    """Whether memory that a CPU tensor shows as bools holds something else than 0 and 1."""
    return tensor.dtype is torch.bool and bool((tensor.detach().view(torch.uint8) > 1).any())


def _fill(drawing: _Drawing, lines: int, grad: bool) -> None:
    draw = drawing.draw
    number = 0
    for _ in range(lines * 6):
        if len(drawing.lines) >= lines:
            return
        names = drawing.tensors()
        x, y = draw.choice(names), draw.choice(names)
        kind = draw.choices(("view", "new", "write", "break"), (4, 2, 6, 0.3))[0]
        if kind == "break":
            drawing.attempt("torch._dynamo.graph_break()", None, ())
            continue
        text: str = draw.choice({"view": VIEWS, "new": NEW, "write": WRITES}[kind])
        if text in LEFT_OUT:
            continue
        perm = list(range(max(drawing.scopes[0][x].dim(), 1)))
        draw.shuffle(perm)
        line = text.format(x=x, y=y, perm=", ".join(map(str, perm)))
        target = x if kind == "write" or ".copy_(" in text else None
        if kind != "write":
            line = f"v{number} = {line}"
            number += 1
        # Not a view: AOTAutograd takes those that a graph gives again, and autograd sees it.
        if grad and kind != "view" and draw.random() < 0.25:
            line = f"with torch.no_grad(): {line}"
        if target is not None and x == y and ("{y}." in text or "{y}[" in text):
            continue  # written to and read at other places at once
        added = drawing.attempt(line, target, (y,) if "{y}" in text else (), text in CROSSING)
        if not added or kind == "write":
            continue
        if "as_strided" in text and not drawing.differentiable(x, f"v{number - 1}"):
            drawing.drop()
            continue
        # Also some of what is new may be what it is made of, such as ``x.float()``.
        if x in drawing.read_only or read_only(text):
            drawing.read_only.add(f"v{number - 1}")


def draw(seed: int) -> Program:
    """A program that eager takes at its first call."""
    for attempt in _attempts(seed):
        if attempt is not None:
            return attempt
    raise AssertionError("no program could be drawn")


def _attempts(seed: int) -> Iterator[Program | None]:
    draw = random.Random(seed)
    apart = random.Random(f"apart {seed}").random() < 0.2
    for _ in range(200):
        dynamic = draw.random() < 0.15
        grad = draw.random() < 0.35
        shapes = CHANGING if dynamic else SHAPES
        bases = [
            Base(
                draw.choice(shapes if draw.random() < 0.8 else SHAPES),
                dtype := draw.choice(DTYPES),
                draw.choice(("", "leaf", "made")) if grad and dtype == FLOAT else "",
            )
            for _ in range(draw.randint(1, 3))
        ]
        bases = [Base(bases[0].shape, bases[0].dtype, b.grad if b.dtype == FLOAT == bases[0].dtype else "")
                 if draw.random() < 0.6 else b for b in bases]  # fmt: skip
        runs = tuple((n, seed % 1000 + at) for at, n in enumerate((*SIZES, SIZES[0]) if dynamic else (SIZES[0],) * 2))
        made = _drawn(draw, tuple(bases), tuple(_holders(draw, bases)), runs, dynamic, grad)
        yield made if made is None else replace(made, apart=apart)


def _scope(program: Program, n: int) -> dict[str, Any]:
    """The names that a program's lines begin with, on the CPU."""
    state = State(program, "cpu")
    given = dict(zip([h.name for h in program.arguments()], state.arguments(n, 0), strict=True))
    kept = {h.name: getattr(state.module, h.name) for h in program.holders if h.kind in ("buffer", "parameter")}
    closed = dict(zip([h.name for h in program.holders if h.kind == "closure"], state.closures, strict=True))
    return {**given, **kept, **closed}


def _drawn(
    draw: random.Random,
    bases: tuple[Base, ...],
    holders: tuple[Holder, ...],
    runs: tuple[tuple[int, int], ...],
    dynamic: bool,
    grad: bool,
) -> Program | None:
    empty = Program(bases, holders, (), (), (), dynamic)

    def start() -> list[dict[str, Any]]:
        return [_scope(replace(empty, runs=((n, 0),)), n) for n in (SIZES if dynamic else SIZES[:1])]

    try:
        drawing = _Drawing(draw, start)
    except Exception:
        return None  # a view that the base has not
    if any(value.numel() > 64 or not value.numel() for scope in drawing.scopes for value in scope.values()):
        return None
    drawing.read_only = {h.name for h in holders if read_only(h.view)}
    try:
        _fill(drawing, draw.randint(2, 9), grad)
    except RuntimeError:
        return None  # a line needs what one that was left out had changed
    # The results are written to after the call.
    names = [name for name in drawing.tensors() if name not in drawing.read_only] or ["None"]
    results = tuple(draw.choice(names) for _ in range(draw.randint(1, 4)))
    return Program(bases, holders, tuple(drawing.lines), results, runs, dynamic) if drawing.lines else None
