"""``.safetensors`` files, read and written without PyTorch (https://github.com/huggingface/safetensors, format)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

from ..core.errors import ErrorCode, ProgramError
from .checked import MAX_RANK, check_amount, read_each, read_list, read_number, read_object, read_text
from .document import ELEMENT_SIZE
from .loader import FileLoader, SegmentInfo

__all__ = ["File", "Tensor", "write"]

_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES: Final = {name: code for code, name in _DTYPES.items()}
_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER: Final = 100_000_000  # the limit of the format
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """A contiguous tensor: dtype name, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    size = ELEMENT_SIZE[dtype]
    for extent in shape:
        size *= extent
    return size


class File:
    """A memory-mapped ``.safetensors`` file; :class:`ProgramError` (``INVALID_EXTERNAL_DATA``) if it is not one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        loader = FileLoader(path)
        self._view = loader.load(0, loader.size, SegmentInfo("external", os.fspath(path)))
        self._header: dict[str, Any] = {}
        try:
            (length,) = _LENGTH.unpack_from(self._view)
            self._start = _LENGTH.size + length
            if length > _MAX_HEADER or self._start > len(self._view):
                raise ValueError("its header is too long")
            text = bytes(self._view[_LENGTH.size : self._start])
            check_amount(text, len(self._view))
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("its header is not an object")
            self._header = cast("dict[str, Any]", header)
        except (ValueError, struct.error, RecursionError, MemoryError) as error:
            raise self._bad(path, str(error) or type(error).__name__) from error
        self._path = path

    @staticmethod
    def _bad(path: str | os.PathLike[str], why: object) -> ProgramError:
        code = ErrorCode.INVALID_EXTERNAL_DATA
        return ProgramError(f"{os.fspath(path)!r} is not a safetensors file: {why}", code=code)

    def names(self) -> list[str]:
        """The tensors' names."""
        return [name for name in self._header if name != "__metadata__"]

    def get(self, name: str) -> Tensor | None:
        """A tensor, or ``None`` if there is none of that name."""
        if name not in self._header or name == "__metadata__":
            return None
        try:
            row = read_object(self._header[name])
            sizes = read_list(row["shape"])
            if len(sizes) > MAX_RANK:
                raise ValueError(f"it has more than {MAX_RANK} dimensions")
            dtype, shape = _DTYPES[read_text(row["dtype"])], read_each(read_number, sizes)
            begin, end = read_each(read_number, read_list(row["data_offsets"], 2))
            if begin > end or end - begin != _size(dtype, shape) or self._start + end > len(self._view):
                raise ValueError("a tensor does not lie within the file")
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad(self._path, f"tensor {name!r}: {error}") from error
        return Tensor(dtype, shape, self._view[self._start + begin : self._start + end])


def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors to an empty binary file, each aligned to its element size at least."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # Largest elements first: then every tensor is aligned without padding, which the format does not allow.
    ordered = sorted(tensors.items(), key=lambda item: (-ELEMENT_SIZE[item[1].dtype], item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ProgramError(f"safetensors files have no dtype {tensor.dtype} (tensor {name!r})")
        end = position + len(tensor.data)
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    file.write(_LENGTH.pack(len(text)) + text)
    for _, tensor in ordered:
        file.write(tensor.data)
