"""The parts of a program: what its document says, as data classes. See :mod:`.document` for how it is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ..core.specs import CompileSpecs, contiguous_strides

__all__ = [
    "ELEMENT_SIZE",
    "CallRecord",
    "Constant",
    "DebugInfo",
    "DelegateRecord",
    "Document",
    "Dynamic",
    "Extent",
    "Header",
    "Input",
    "Instruction",
    "KernelRecord",
    "Literal",
    "MethodRecord",
    "Origin",
    "Output",
    "OutputForm",
    "Product",
    "Spec",
    "StateUpdate",
    "Symbol",
    "extent_of",
    "product_of",
    "variant_name",
]

ELEMENT_SIZE: Final[Mapping[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes per element of the dtypes a program may hold."""

Literal = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, dtype name and strides (in elements) of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps."""
        size = ELEMENT_SIZE[self.dtype]
        for extent in self.shape:
            size *= extent
        return size

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last; 0 if there is none."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * ELEMENT_SIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are the row-major ones."""
        return self.strides == contiguous_strides(self.shape)

    @property
    def may_overlap(self) -> bool:
        """Whether elements may share memory: a tensor of these strides cannot be written, only shown."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride <= reach:
                return 0 not in self.shape
            reach += (size - 1) * stride
        return False

    def __str__(self) -> str:
        tail = "" if self.is_contiguous else f" strides {list(self.strides)}"
        return f"{self.dtype}{list(self.shape)}{tail}"


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a method: a tensor (``value`` is its number), or something else that must equal ``literal``."""

    name: str
    spec: Spec | None
    literal: Literal = None


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a method: a value's number, or something that is the same in every call."""

    value: int | None
    spec: Spec | None = None
    literal: Literal = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor in the file, or in a ``.safetensors`` file beside it (``external``: the file; ``entry``: the key)."""

    name: str
    spec: Spec
    entry: str
    offset: int = 0
    external: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """A buffer that a method reads or changes: its constant, the number of the value it has, and of its new value.

    The two are equal where a method only reads a buffer that another one changes.
    """

    constant: int
    value: int
    result: int


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One ATen operator. Arguments are JSON, ``{"n": i}`` for value *i*; ``results`` has ``None`` for unused ones."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    several: bool = False
    handle: int = 0


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One delegate's call: numbers of arguments and results."""

    delegate: int
    args: tuple[int, ...]
    results: tuple[int, ...]


Instruction = KernelRecord | CallRecord


@dataclass(frozen=True, slots=True)
class DelegateRecord:
    """Bytes for one backend. ``constants`` are inputs that are given once, by position; ``inputs`` has every input."""

    backend: str
    version: str
    entry: str
    specs: CompileSpecs
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    constants: Mapping[int, int] = field(default_factory=dict[int, int])
    named_data: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class MethodRecord:
    """One entry point: ``values`` numbers of values, of which ``inputs`` come first, then ``constants``."""

    name: str
    values: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: Mapping[int, int]
    state: tuple[StateUpdate, ...]
    delegates: tuple[DelegateRecord, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that changes from call to call, and between which sizes."""

    name: str
    least: int
    most: int


Extent: TypeAlias = int | tuple[int, int, int]
"""The size of an input's dimension: a number, or (symbol, multiple, offset)."""
Product: TypeAlias = tuple[tuple[int, int | None], ...]
"""A size as factors: (number, ``None``), or (0, symbol)."""


def extent_of(extent: Extent, sizes: Sequence[int]) -> int:
    """An input's size for these values of the symbols."""
    return extent if isinstance(extent, int) else extent[1] * sizes[extent[0]] + extent[2]


def product_of(product: Product, sizes: Sequence[int]) -> int:
    """The size that factors amount to for these values of the symbols."""
    return math.prod(number if symbol is None else sizes[symbol] for number, symbol in product)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How an output follows from the symbols: its dimensions (``None``: computed otherwise), or the number it is."""

    dims: tuple[Product | None, ...] | None = None
    number: Product | None = None


def variant_name(method: str, sizes: Sequence[int]) -> str:
    """The name of the method for these values of the symbols; none that a user can give."""
    return f"{method}@{','.join(map(str, sizes))}"


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A method with sizes that change: one ordinary method per set of ``variants`` sizes.

    ``padded``: a variant serves smaller sizes, too, and takes the true ones as further inputs (float32, 0-dim); else
    ``reason`` says why each serves its own alone. ``inputs``: per input its dimensions, ``None`` for no tensor.
    """

    symbols: tuple[Symbol, ...]
    inputs: tuple[tuple[Extent, ...] | None, ...]
    outputs: tuple[OutputForm | None, ...]
    variants: tuple[tuple[int, ...], ...]
    padded: bool
    reason: str = ""

    def names(self, method: str) -> list[str]:
        """The variants' names."""
        return [variant_name(method, sizes) for sizes in self.variants]

    @property
    def largest(self) -> tuple[int, ...]:
        """The sizes of the largest variant."""
        return max(self.variants, key=lambda sizes: (math.prod(sizes), sizes))


@dataclass(slots=True)
class Document:
    """A whole program. ``digests`` are the sizes and SHA-256 of the entries that it needs; ``dynamic`` are methods
    whose variants are among ``methods``."""

    methods: dict[str, MethodRecord]
    constants: list[Constant]
    digests: dict[str, tuple[int, str]]
    producer: dict[str, str] = field(default_factory=dict[str, str])
    dynamic: dict[str, Dynamic] = field(default_factory=dict[str, Dynamic])

    def names(self) -> tuple[str, ...]:
        """The methods a user sees, each dynamic one in the place of its first variant."""
        of_variant = {variant: name for name, one in self.dynamic.items() for variant in one.names(name)}
        return tuple(dict.fromkeys(of_variant.get(name, name) for name in self.methods))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operator comes from. ``module``: the ``nn.Module``'s path; ``source``: the user's line;
    ``hierarchy``: the modules around it with their classes; ``stack``: the user's calls with their text, outermost
    first."""

    module: str = ""
    source: str = ""
    op: str = ""
    hierarchy: str = ""
    stack: str = ""


@dataclass(slots=True)
class DebugInfo:
    """Debug handles: where each operator comes from. ``maps`` are the delegates' own ids, per method and index."""

    handles: dict[int, Origin] = field(default_factory=dict[int, Origin])
    maps: dict[str, list[dict[int | str, tuple[int, ...]]]] = field(
        default_factory=dict[str, list[dict[int | str, tuple[int, ...]]]]
    )


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of the document: readable whatever the version."""

    version: int
    oldest: int
    sha256: str
    size: int
