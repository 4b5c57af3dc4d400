"""What shape inference and decompositions gave, as bytes for other processes."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table

from torchport.backend.batch_norm import BATCH_NORM
from torchport.backend.builder import _known_as
from torchport.backend.infer import exact_key, infer, remembered
from torchport.backend.inferences import _CallUnpickler, _written
from torchport.backend.inlined import Inlined, Ref

aten = torch.ops.aten


def _read(data: bytes) -> object:
    return _CallUnpickler(io.BytesIO(data)).load()


def test_a_factory_s_call_is_kept_though_it_names_a_device() -> None:
    infer(aten.ones.default, ([2, 3],), {"device": torch.device("cpu")})
    key, found = next(item for item in reversed(remembered()[0].items()) if item[0][0] is aten.ones.default)
    assert _read(_written((key, found))) == (key, found)


def test_what_a_decomposition_calls_is_kept() -> None:
    made = Inlined(((aten.mul.Tensor, (Ref(0), 2.0), {}), (None, (Ref(1), 0), {})), (Ref(2), None))
    item = exact_key(("core", aten.addcmul.default), (1, 1.0, True), {"dtype": torch.float32}), made
    assert _read(_written(item)) == item


def test_calls_that_differ_in_a_number_s_type_are_told_apart() -> None:
    assert len({exact_key("f", (one,), {}) for one in (1, 1.0, True, 2)}) == 4
    with pytest.raises(TypeError):
        exact_key("f", ({},), {})


def test_a_decomposition_is_known_elsewhere_by_its_module_s_name_for_it() -> None:
    op = aten.native_batch_norm.default
    made = BATCH_NORM[op]
    item = exact_key(_known_as(made, op), (1, 1.0), {}), Inlined((), None)
    assert _read(_written(item)) == item
    assert _known_as(decomposition_table[aten.addcmul.default], aten.addcmul.default) is not None

    @functools.wraps(made)
    def otherwise(*args: Any) -> Any:
        return made(*args)

    for own in (otherwise, lambda *args: made(*args), functools.partial(made), torch.maximum):
        assert _known_as(own, op) is None
