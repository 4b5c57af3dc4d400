"""What a tensor looks like without its values, and what a compiler is told besides the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_NAMES", "CompileSpec", "CompileSpecs", "TensorSpec", "contiguous_strides", "is_dense"]


DTYPE_NAMES: Final = frozenset(
    (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
        "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)  # fmt: skip
"""Names of the dtypes that tensors of the device may have."""


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a tensor of this shape (PyTorch's rule for empty dimensions included)."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are the row-major ones of some permutation of the dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and strides (in elements) of a dense tensor. Hashable."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor (real or fake)."""
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are the row-major ones."""
        return self.strides == contiguous_strides(self.shape)

    @property
    def dtype_name(self) -> str:
        """The dtype without ``torch.``, such as ``"float32"``; in a process without PyTorch that is all there is."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        tail = "" if self.is_contiguous else f" strides {list(self.strides)}"
        return f"{self.dtype_name}{list(self.shape)}{tail}"


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One option for a backend's compiler: a key and opaque bytes, as in ExecuTorch's ``CompileSpec``."""

    key: str
    value: bytes


class CompileSpecs(Mapping[str, bytes]):
    """An immutable, ordered set of :class:`CompileSpec` with unique keys.

    Raises :class:`ConfigError` for a repeated key.
    """

    __slots__ = ("_items",)

    def __init__(self, specs: Iterable[CompileSpec] | Mapping[str, bytes | str] = ()) -> None:
        self._items: dict[str, bytes] = {}
        if isinstance(specs, Mapping):
            given = cast("Mapping[str, bytes | str]", specs)
            specs = [CompileSpec(k, v.encode() if isinstance(v, str) else v) for k, v in given.items()]
        for spec in specs:
            if spec.key in self._items:
                raise ConfigError(f"compile spec {spec.key!r} is given twice; give each key once")
            if not isinstance(spec.value, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
                kind = type(spec.value).__name__
                raise ConfigError(
                    f"compile spec {spec.key!r} is a {kind}; its value must be bytes (or text, in a dict)"
                )
            self._items[spec.key] = spec.value

    def __getitem__(self, key: str) -> bytes:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def text(self, key: str, default: str = "") -> str:
        """A value decoded as UTF-8, or ``default`` when the key is absent."""
        return self._items[key].decode() if key in self._items else default

    def fingerprint(self) -> str:
        """A stable hash of keys and values; part of the compile cache's key."""
        digest = hashlib.sha256()
        for key, value in sorted(self._items.items()):
            digest.update(f"{len(key)}:{key}{len(value)}:".encode() + value)
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"CompileSpecs({self._items!r})"
