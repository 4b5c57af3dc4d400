"""The section of a program's document about methods with sizes that change: as JSON, and back, every part checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .checked import bad, read_each, read_flag, read_list, read_number, read_object, read_text
from .schema import (
    Dynamic,
    Extent,
    MethodRecord,
    Output,
    OutputForm,
    Product,
    Spec,
    Symbol,
    extent_of,
    product_of,
    variant_name,
)

__all__ = ["LARGEST_PADDED", "TRUE_SIZE", "dynamic_json", "read_dynamic"]

_LARGEST: Final = 1 << 31
_MOST: Final = 64
"""Symbols of a method, dimensions of a tensor, factors of a size."""
TRUE_SIZE: Final = Spec("float32", (), ())
"""What a padded variant takes for each symbol, after its own inputs: some engines have no integers."""
LARGEST_PADDED: Final = 1 << 24
"""Whole numbers up to this one are float32 numbers."""


# -- writing -----------------------------------------------------------------------------------------------------------
def _product_json(product: Product | None) -> Any:
    return None if product is None else [number if symbol is None else [symbol] for number, symbol in product]


def _form_json(form: OutputForm | None) -> Any:
    if form is None:
        return None
    if form.dims is None:
        return {"number": _product_json(form.number)}
    return {"dims": [_product_json(dim) for dim in form.dims]}


def dynamic_json(dynamic: Dynamic) -> dict[str, Any]:
    """The section's entry for one method."""
    return {
        "symbols": [[one.name, one.least, one.most] for one in dynamic.symbols],
        "inputs": [None if dims is None else list(dims) for dims in dynamic.inputs],
        "outputs": [_form_json(form) for form in dynamic.outputs],
        "variants": [list(sizes) for sizes in dynamic.variants],
        "padded": dynamic.padded,
        "reason": dynamic.reason,
    }


# -- reading -----------------------------------------------------------------------------------------------------------
def _symbol(value: object) -> Symbol:
    name, least, most = read_list(value, 3)
    shown = read_text(name)
    if not shown.isidentifier() or len(shown) > _MOST:
        raise bad(f"{shown[:_MOST]!r} is not the name of a size")
    found = Symbol(shown, read_number(least, _LARGEST), read_number(most, _LARGEST))
    if not 1 <= found.least <= found.most:
        raise bad(f"size {shown!r} has the range {found.least} to {found.most}")
    return found


def _extent(value: object, symbols: int) -> Extent:
    if not isinstance(value, list):
        return read_number(value)
    at, multiple, offset = read_list(value, 3)
    if isinstance(offset, bool) or not isinstance(offset, int) or abs(offset) >= _LARGEST:
        raise bad("expected a whole number")
    if read_number(multiple, _LARGEST) < 1:
        raise bad("a size is no multiple of the one that it depends on")
    return read_number(at, symbols), multiple, offset


def _dims(value: object, symbols: int) -> tuple[Extent, ...] | None:
    return None if value is None else read_each(_extent, value, symbols)


def _factor(value: object, symbols: int) -> tuple[int, int | None]:
    if isinstance(value, list):
        (at,) = read_list(value, 1)
        return 0, read_number(at, symbols)
    return read_number(value), None


def _product(value: object, symbols: int) -> Product | None:
    found = None if value is None else read_each(_factor, value, symbols)
    if found is not None and len(found) > _MOST:
        raise bad("a size has too many factors")
    if found is not None and len(found) > 1 and (0, None) in found:
        raise bad("a size of 0 has other factors")
    return found


def _form(value: object, symbols: int) -> OutputForm | None:
    if value is None:
        return None
    found = read_object(value)
    if "number" in found:
        return OutputForm(None, _product(found["number"], symbols))
    return OutputForm(read_each(_product, found["dims"], symbols))


def _sizes(value: object, symbols: Sequence[Symbol], padded: bool) -> tuple[int, ...]:
    found = tuple(read_number(one, _LARGEST) for one in read_list(value, len(symbols)))
    if not all(one.least <= size <= one.most for one, size in zip(symbols, found, strict=True)):
        raise bad("a variant is for sizes out of range")
    return found


def read_dynamic(name: str, value: object, methods: Mapping[str, MethodRecord]) -> Dynamic:
    """One method of the section. Every variant must be a method that does what the section says of it."""
    found = read_object(value)
    if not name.isidentifier() or name in methods:
        raise bad(f"a method with sizes that change cannot be called {name[:80]!r}")
    symbols = read_each(_symbol, found["symbols"])
    if not 1 <= len(symbols) <= _MOST or len({one.name for one in symbols}) != len(symbols):
        raise bad("a method has no sizes that change, too many of them, or two of one name")
    padded = read_flag(found["padded"])
    inputs, outputs = (
        read_each(_dims, found["inputs"], len(symbols)),
        read_each(_form, found["outputs"], len(symbols)),
    )
    variants = read_each(_sizes, found["variants"], symbols, padded)
    dynamic = Dynamic(symbols, inputs, outputs, variants, padded, read_text(found["reason"]))
    if not variants or len(set(variants)) != len(variants):
        raise bad("a method with sizes that change has no variant, or one twice")
    if padded:
        _check_grid(dynamic)
    sourced = {dim[0] for dims in inputs if dims is not None for dim in dims if not isinstance(dim, int)}
    if len(sourced) != len(symbols):
        raise bad("a size that changes is no input's")
    first = None
    for sizes in variants:
        method = methods.get(variant_name(name, sizes))
        if method is None:
            raise bad(f"variant {variant_name(name, sizes)!r} is missing")
        _check_variant(dynamic, method, sizes, method if first is None else first)
        first = method if first is None else first
    return dynamic


def _check_grid(dynamic: Dynamic) -> None:
    """Every call within range finds a variant that is as large."""
    axes = [sorted({sizes[at] for sizes in dynamic.variants}) for at in range(len(dynamic.symbols))]
    total = 1
    for axis in axes:
        total *= len(axis)
    if total != len(dynamic.variants) or set(itertools.product(*axes)) != set(dynamic.variants):
        raise bad("variants for padded sizes are missing")
    if any(one.most > LARGEST_PADDED for one in dynamic.symbols):
        raise bad("a padded size is too large")
    if any(axis[-1] != one.most for axis, one in zip(axes, dynamic.symbols, strict=True)):
        raise bad("there are sizes within range that no variant is large enough for")
    plain = all(isinstance(dim, int) or dim[1:] == (1, 0) for dims in dynamic.inputs for dim in dims or ())
    if not plain:
        raise bad("a padded size is computed from another")


def _check_variant(dynamic: Dynamic, method: MethodRecord, sizes: tuple[int, ...], first: MethodRecord) -> None:
    own = len(dynamic.inputs)
    true = method.inputs[own:]
    if len(method.inputs) - own != (len(dynamic.symbols) if dynamic.padded else 0) or len(true) < 0:
        raise bad("a variant has another number of inputs than its method")
    if any(one.spec != TRUE_SIZE for one in true):
        raise bad("a variant does not take the true sizes")
    for dims, one, other in zip(dynamic.inputs, method.inputs, first.inputs, strict=False):
        same = one.name == other.name and repr(one.literal) == repr(other.literal)
        if not same or (dims is None) != (one.spec is None):
            raise bad(f"input {one.name[:80]!r} differs between variants")
        if dims is not None and one.spec is not None:
            shape = tuple(extent_of(dim, sizes) for dim in dims)
            if other.spec is None or one.spec.dtype != other.spec.dtype or one.spec.shape != shape:
                raise bad(f"input {one.name[:80]!r} of a variant has another shape than its method says")
    if len(method.outputs) != len(dynamic.outputs):
        raise bad("a variant has another number of outputs than its method")
    for form, one, other in zip(dynamic.outputs, method.outputs, first.outputs, strict=True):
        _check_output(dynamic, form, one, other, sizes)


def _check_output(dynamic: Dynamic, form: OutputForm | None, one: Output, other: Output, sizes: Sequence[int]) -> None:
    if form is None or form.dims is None:
        if one.value is not None:
            raise bad("an output of a variant is a tensor, but its method says it is none")
        if form is not None and form.number is None:
            if dynamic.padded or type(one.literal) is not int:
                raise bad("an output is a number that nothing is said about")
            return
        number = other.literal if form is None else product_of(form.number or (), sizes)
        if repr(one.literal) != repr(number):
            raise bad("an output that is a number differs from what the method says")
        return
    if one.spec is None or other.spec is None or one.spec.dtype != other.spec.dtype:
        raise bad("an output's dtype differs between variants")
    if len(one.spec.shape) != len(form.dims):
        raise bad("an output has another number of dimensions than its method says")
    for dim, size in zip(form.dims, one.spec.shape, strict=True):
        if (dim is None and dynamic.padded) or (dim is not None and product_of(dim, sizes) != size):
            raise bad("an output of a variant has another shape than its method says")
