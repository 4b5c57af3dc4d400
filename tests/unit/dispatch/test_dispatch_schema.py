"""Schemas: every one of PyTorch's, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchport.core.errors import DispatchError
from torchport.dispatch import parse_schema
from torchport.dispatch.schema import MISSING

TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
NAMED_TWICE = {"static_runtime::clamp_nan_to_num"}
"""PyTorch's own slip: two arguments of one name, which we refuse."""


def test_every_schema_of_pytorch() -> None:
    c: Any = torch._C
    seen = 0
    for name in {name.partition(".")[0] for name in c._dispatch_get_all_op_names()} - NAMED_TWICE:
        for theirs in c._jit_get_schemas_for_operator(name):
            ours = parse_schema(str(theirs))
            seen += 1
            assert [(a.name, a.kwarg_only, a.has_default) for a in ours.arguments] == [
                (a.name, a.kwarg_only, a.has_default_value()) for a in theirs.arguments
            ], theirs
            assert [a.carries_tensors for a in ours.arguments] == [str(a.type) in TENSORS for a in theirs.arguments]
            assert len(ours.returns) == len(theirs.returns) or ours.returns == ("...",)
            for mine, yours in zip(ours.arguments, theirs.arguments, strict=True):
                assert mine.default is MISSING or mine.default == yours.default_value, theirs
    assert seen > 3_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "begin with"),
        ("foo(Tensor x) -> Tensor", "begin with"),
        ("a::(Tensor x) -> Tensor", "begin with"),
        ("a::b", "begin with"),
        ("a::b(Tensor x) -> Tensor extra junk", "after the return type"),
        ("a::b(Tensor x)", "expected '->'"),
        ("a::b(Tensor x -> Tensor", "expected ','"),
        ("a::b(Tensr x) -> Tensor", "unknown type 'Tensr'"),
        ("a::b(Tensor) -> Tensor", "an argument name"),
        ("a::b(Tensor x, Tensor x) -> Tensor", "named twice"),
        ("a::b(Tensor x, *, *, int y) -> Tensor", "more than one"),
        ("a::b(Tensor x, int[ y) -> Tensor", r"expected '\]'"),
        ("a::b(Tensor x=) -> Tensor", "expected"),
        ("a::b(Tensor(a x) -> Tensor", "alias annotation|expected"),
        ("a::b(Tensor x; int y) -> Tensor", "unexpected ';"),
        ("a::b(Tensor x) ->", "a type"),
    ],
)
def test_malformed(text: str, why: str) -> None:
    with pytest.raises(DispatchError, match=why):
        parse_schema(text)


def test_bind() -> None:
    schema = parse_schema("a::b(Tensor x, int n=2, MemoryFormat m=contiguous_format, int k=5, *, int z=1) -> Tensor")
    assert schema.bind((1,), {}) == ((1,), {})
    assert schema.bind((1,), {"n": 3}) == ((1, 3), {})
    assert schema.bind((), {"x": 1, "z": 9}) == ((1,), {"z": 9})
    assert schema.bind((1,), {"m": 0}) == ((1, 2, 0), {})
    assert schema.bind((1,), {"k": 0}) == ((1, 2), {"k": 0}), "a constant of PyTorch cannot be filled in"
    with pytest.raises(DispatchError, match="needs argument 'x'"):
        schema.bind((), {"n": 1})
    with pytest.raises(DispatchError, match="needs argument 'x'"):
        schema.bind((), {})
    with pytest.raises(DispatchError, match="takes 4 positional"):
        schema.bind((1, 2, 3, 4, 5), {})
    with pytest.raises(DispatchError, match="'x' twice"):
        schema.bind((1,), {"x": 2})
    with pytest.raises(DispatchError, match="no argument 'q'"):
        schema.bind((1,), {"q": 2})
    with pytest.raises(DispatchError, match="keyword argument 'z'"):
        parse_schema("a::b(Tensor x, *, int z) -> Tensor").bind((1,), {})


def test_parts() -> None:
    schema = parse_schema("a::b.out(Tensor? x, (int, float)[] y=[], *, Tensor(a!)[] out) -> (Tensor(a!) r, int)")
    assert schema.name == "a::b.out"
    assert [a.type for a in schema.arguments] == ["Tensor?", "(int, float)[]", "Tensor(a!)[]"]
    assert [a.carries_tensors for a in schema.arguments] == [True, False, True]
    assert schema.returns == ("Tensor(a!)", "int")
    assert str(schema).startswith("a::b.out(")
    assert parse_schema("a::f(...) -> ...").varargs
