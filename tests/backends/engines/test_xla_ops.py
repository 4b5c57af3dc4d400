"""Every lowering of the ``xla`` backend, called by itself on what OpInfo reaches, against CPU eager."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xla_samples
from torch import fx
from torch.utils._pytree import tree_map

from torchport.backend.infer import fake_tensor
from torchport.backend.interface import BackendDevice, ExecutionContext, FreeableBuffer, InitContext
from torchport.backends.xla import XlaBackend
from torchport.core.specs import CompileSpecs, TensorSpec

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
TABLE: Any = {}
JAX_DTYPES: Any = {}
if backend.is_available():
    from torchport.backends.xla.dtypes import JAX_DTYPES
    from torchport.backends.xla.ops import TABLE

DEVICE = backend.devices()[0] if backend.is_available() else BackendDevice("cpu", 0)
"""JAX's first: what these tests run on."""
PAGE = Path(__file__).parents[3] / "docs" / "xla-ops.md"
aten = torch.ops.aten
getitem: Any = operator.getitem
FAST = 10
"""How many overloads are tested by default; a fixed choice, the others are slow tests."""

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.complex64: {"rtol": 1e-4, "atol": 1e-5},
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
}
CANCELLING = {"native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"}
"""Gradients that are differences of large numbers where few elements are normalised: zero up to rounding."""
CHECKED = {"activations", "binary", "factories", "matmul", "pointwise", "reductions", "sorting", "views"}
"""Topics whose operators check every shape they are given; others' CPU kernels may read what is not there."""
ROUNDED_OFTEN = {"addbmm", "addr", "segment_reduce"}
"""The CPU adds one product after the other in bfloat16 and rounds each time; XLA rounds once."""
TIES = {"sort", "topk", "mode"}
"""Where equal values came from is the engine's choice; ``test_sorted_places`` looks at the places."""
NOT_IN_HALF = {
    aten.histc.default,
    aten.grid_sampler_3d.default,
    aten.grid_sampler_3d_backward.default,
    aten.linalg_matrix_exp.default,
}
"""Refused in half precision, where the CPU rounds at every step."""
VECTORS = {aten._linalg_svd.default, aten._linalg_eigh.default}
"""Refused with vectors, which OpInfo's samples want; their values are among ``_NOT_REACHED``."""
LARGE = {"linalg_matrix_exp": 1e-2, "linalg_pinv": 1e-3}
"""Errors that are small beside the largest element."""
FACTORS_OF_EITHER = {"_linalg_det": 1, "_linalg_slogdet": 2}
"""From which result on there are factors, of the matrix or of its transpose: a sample's copy has other strides."""
UNDEFINED = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"}


# -- running one graph of many calls ----------------------------------------------------------------
def _graph(calls: Sequence[xla_samples.Instance]) -> tuple[fx.GraphModule, list[torch.Tensor], list[torch.Tensor]]:
    """A graph of all the calls, its inputs, and the expected outputs; calls that the backend refuses are left out."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    nodes: list[tuple[xla_samples.Instance, fx.Node]] = []
    places: dict[int, fx.Node] = {}
    calls = [call for call in calls if all(t is None or t.dtype in JAX_DTYPES for t in (*call.inputs, *call.expected))]
    for call in calls:
        for tensor in call.inputs:
            places[id(tensor)] = node = graph.placeholder(f"arg{len(inputs)}")
            node.meta["val"] = fake_tensor(TensorSpec.of(tensor))
            inputs.append(tensor)
    outputs: list[fx.Node] = []
    expected: list[torch.Tensor] = []
    for number, call in enumerate(calls):
        args, kwargs = tree_map(
            lambda leaf: places[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, (call.args, call.kwargs)
        )
        node = graph.call_function(call.op, tuple(args), dict(kwargs))
        several = len(call.op._schema.returns) > 1 or "List" in str(call.op._schema.returns[0].type)
        values = [None if e is None else fake_tensor(TensorSpec.of(e)) for e in call.expected]
        node.meta.update(val=tuple(values) if several else values[0], debug_handle=number, source=None)
        nodes.append((call, node))
        if not backend.supports(node):
            graph.erase_node(node)
            continue
        for position, value in enumerate(call.expected):
            if value is None:
                continue
            one = node
            if several:
                one = graph.call_function(getitem, (node, position))
                one.meta.update(val=values[position], debug_handle=number, source=None)
            outputs.append(one)
            expected.append(value)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph), inputs, expected


def _run(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    processed = backend.preprocess(graph, CompileSpecs())
    handle = backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(DEVICE))
    args = [backend.to_device(tensor.clone(), DEVICE) for tensor in inputs]
    results = [backend.from_device(data) for data in backend.execute(handle, args, ExecutionContext(DEVICE))]
    backend.destroy(handle)
    return results


def _check(calls: Sequence[xla_samples.Instance]) -> int:
    """Compare a batch of calls; returns how many results were compared."""
    graph, inputs, expected = _graph(calls)
    actual = _run(graph, inputs)
    for got, want, node in zip(actual, expected, graph.graph.output_node().args[0], strict=True):
        call = node if node.target is not getitem else node.args[0]
        shown = f"{call.target}{tree_map(_shown, (call.args, call.kwargs))}"
        name = str(call.target).split(".")[1]
        if node is call or node.args[1] < FACTORS_OF_EITHER.get(name, 99):
            _agree(name, got, want, shown)
    return len(expected)


def _agree(name: str, got: torch.Tensor, want: torch.Tensor, shown: str) -> None:
    assert got.shape == want.shape, shown
    assert got.dtype == want.dtype, shown
    if name in UNDEFINED or (name in TIES and want.dtype is torch.int64):
        return
    tolerance = TOLERANCES.get(want.dtype, {"rtol": 0.0, "atol": 0.0})
    if name in ROUNDED_OFTEN and want.dtype is torch.bfloat16:
        tolerance = {"rtol": 0.1, "atol": 0.5}
    if name in CANCELLING:
        tolerance = {**tolerance, "atol": max(tolerance["atol"], 1e-4)}
    if name in LARGE and want.numel():
        tolerance = {**tolerance, "atol": LARGE[name] * float(want.abs().max())}
    torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m: f"{shown}\n{m}", **tolerance)


def _shown(leaf: Any) -> Any:
    return str(TensorSpec.of(leaf.meta["val"])) if isinstance(leaf, fx.Node) else leaf


def _choice() -> list[Any]:
    """Overloads with the fixed, seeded choice unmarked and the rest slow."""
    names = [op for op in sorted(TABLE, key=str) if str(op) in xla_samples.read_sources()]
    fast = set(random.Random(xla_samples.SEED).sample(names, min(FAST, len(names))))
    return [pytest.param(op, marks=() if op in fast else pytest.mark.slow, id=str(op)) for op in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", _choice())
def test_an_overload_equals_cpu_eager(op: Any, dtype: torch.dtype) -> None:
    calls = xla_samples.instances(op, dtype, limit=12)
    if not calls:
        assert dtype is torch.bfloat16, "no sample of OpInfo reaches it any more: write xla_sources.txt again"
        return
    if op in VECTORS:
        assert _check(calls) == 0
        return
    if op in NOT_IN_HALF and dtype is torch.bfloat16:
        assert not any(t.dtype is torch.float32 for call in calls for t in call.inputs)
        assert _check(calls) == 0
        return
    assert _check([*calls, *xla_samples.more(calls, other_shapes=TABLE[op].topic in CHECKED)])


@pytest.mark.parametrize("descending", [False, True])
def test_sorted_places(descending: bool) -> None:
    x = torch.randperm(60, generator=torch.Generator().manual_seed(0)).view(4, 15).float()
    x[1, 3] = x[1, 7] = torch.nan
    places = [
        *_single(aten.sort.stable, x, stable=True, dim=1, descending=descending),
        *_single(aten.topk.default, x[:1], 5, 1, descending),
    ]
    expected = [*torch.sort(x, dim=1, descending=descending, stable=True), *x[:1].topk(5, 1, descending)]
    for got, want in zip(places, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def _single(op: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    result = op(*args, **kwargs)
    expected = list(result) if isinstance(result, (list, tuple)) else [result]
    graph, inputs, _ = _graph([xla_samples.Instance(op, args, kwargs, expected)])
    return _run(graph, inputs)


_I, _F, _B = (
    torch.tensor([[5, -3, 7], [0, 1, -8]]),
    torch.tensor([[0.5, -2.0, 3.0], [0.0, 1.0, -7.5]]),
    torch.tensor([True, False, True]),
)
_S = torch.tensor([0, 3, 70])
_P, _NEAREST = (
    torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(0)),
    ("upsample_nearest", "_upsample_nearest_exact"),
)
_M = _P[0, :, :4, :4].contiguous()
_X = torch.linspace(-1.9, 1.9, 20)
_POLYNOMIALS = [
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]
_NOT_REACHED: list[tuple[Any, tuple[Any, ...]]] = [
    *((getattr(getattr(aten, f"bitwise_{n}"), o), a) for n in ("and", "or", "xor")
      for o, a in (("Scalar", (_I, 6)), ("Scalar_Tensor", (6, _I)), ("Tensor", (_I, _S)))),
    *((getattr(getattr(aten, f"__{n}__"), o), a) for n in ("and", "or", "xor")
      for o, a in (("Scalar", (_I, 6)), ("Tensor", (_I, _S)))),
    (aten.__lshift__.Scalar, (_I, 3)), (aten.__rshift__.Scalar, (_I, 1)), (aten.__lshift__.Tensor, (_I, _S)),
    (aten.__rshift__.Tensor, (_I, _S)), (aten.bitwise_left_shift.Tensor, (_I, _S)),
    (aten.bitwise_right_shift.Tensor, (_I, _S)), (aten.bitwise_left_shift.Tensor_Scalar, (_I, 2)),
    (aten.bitwise_right_shift.Tensor_Scalar, (_I, 2)), (aten.bitwise_left_shift.Scalar_Tensor, (3, _S[:2])),
    (aten.bitwise_right_shift.Scalar_Tensor, (300, _S[:2])),
    (aten.div.Scalar_mode, (_F, 0.7)), (aten.fmod.Scalar, (_F, 0.7)), (aten.remainder.Scalar_Tensor, (3.5, _F[0])),
    (aten.floor_divide.Scalar, (_I, -2)), (aten.true_divide.Tensor, (_I, _I[0])), (aten.clamp_max.default, (_I, 2.5)),
    (aten.xlogy.Scalar_Self, (2.0, _F)), (aten.xlogy.Scalar_Other, (_F, 2.0)), (aten.gcd.default, (_I, _S)),
    (aten.lcm.default, (_I, _S)), (aten.where.ScalarSelf, (_B, 1.5, _F)), (aten.where.ScalarOther, (_B, _F, 1)),
    (aten.where.Scalar, (_B, 1.5, 2)), (aten.fill.Tensor, (_F, torch.tensor(3))), (aten.zero.default, (_F,)),
    (aten.copy.default, (_F, _B)), (aten.var.dim, (_F, [1], False)), (aten.var.default, (_F, True)),
    (aten.std.dim, (_F, [0])), (aten.std.default, (_F, False)), (aten.norm.Scalar, (_F, 3)), (aten.all.default, (_I,)),
    (aten.tril_indices.default, (3, 4, 1)), (aten.triu_indices.default, (3, 4, -1)),
    (aten._unsafe_index.Tensor, (_F, [torch.tensor([1, 0]), None])),
    (aten._unsafe_index_put.default, (_F, [None, torch.tensor([2, 2])], torch.ones(2, 2), True)),
    (aten.scatter.value_reduce, (_F, 1, torch.tensor([[0, 2]]), 2.0)), (aten.repeat_interleave.self_int, (_F, 2, 1)),
    (aten._native_batch_norm_legit_no_training.default, (_F, None, None, _F[0], _F[0].abs(), 0.1, 1e-5)),
    (aten._native_batch_norm_legit_functional.default, (_F, None, None, _F[0], _F[0].abs(), True, 0.1, 1e-5)),
    (aten._native_batch_norm_legit_functional.default, (_F, None, None, _F[0], _F[0].abs(), False, 0.1, 1e-5)),
    (aten.avg_pool1d.default, (torch.arange(14.0).view(1, 2, 7), [3], [2], [1], True, False)),
    (aten.adaptive_avg_pool1d.default, (torch.arange(14.0).view(1, 2, 7), [3])),
    (aten.positive.default, (_F,)), (aten.conj_physical.default, (_F + 1j,)), (aten.resolve_conj.default, (_F + 1j,)),
    (aten.resolve_neg.default, (_F,)), (aten.isfinite.default, (_F / 0,)), (aten.real.default, (_F + 1j,)),
    (aten.imag.default, (_F + 1j,)), (aten._logcumsumexp.default, (_F, 1)), (aten.reshape.default, (_F, [3, 2])),
    (aten._reshape_alias.default, (_F, [3, 2], [2, 1])), (aten.view.dtype, (_F, torch.int32)),
    (aten._embedding_bag_forward_only.default, (_I.float(), torch.tensor([1, 0, 1]), torch.tensor([0, 2]), False, 1)),
    (aten.upsample_linear1d.vec, (_P[0], None, True, [1.5])), (aten.upsample_bilinear2d.vec, (_P, [3, 9], False, None)),
    (aten.upsample_trilinear3d.vec, (_P[None], None, False, [1.0, 0.75, 2.0])),
    (aten.upsample_bicubic2d.vec, (_P, None, False, [1.5, 0.5])),
    *((getattr(aten, f"{n}1d").vec, (_P[0], None, [1.4])) for n in _NEAREST),
    *((getattr(aten, f"{n}2d").vec, (_P, [7, 3], None)) for n in _NEAREST),
    *((getattr(aten, f"{n}3d").vec, (_P[None], None, [1.0, 0.6, 1.7])) for n in _NEAREST),
    (aten.linspace.Tensor_Tensor, (_F[0, 0], _F[1, 2], 7)), (aten.linspace.Tensor_Scalar, (_F[0, 0], 4, 1)),
    (aten.linspace.Scalar_Tensor, (-1.5, _F[0, 2], 6)), (aten.bucketize.Scalar, (1, _S)), (aten.numpy_T.default, (_F,)),
    *((getattr(aten, f"special_{n}").n_scalar, (_X, d)) for n in _POLYNOMIALS for d in (3, 11)),
    *((getattr(aten, f"special_{n}").x_scalar, (x, torch.arange(-1.0, 12))) for n in _POLYNOMIALS for x in (0.3, 1)),
    (aten.special_zeta.default, (torch.tensor([[2.0], [3.0], [2.5], [1.0], [0.5]]), 4 * _X)),
    *((aten.polygamma.default, (n, 4 * _X)) for n in (0, 1, 2, 3)),
    *((op, (_F.T @ _F + torch.eye(3),)) for op in (aten.linalg_svdvals.default, aten.linalg_eigvalsh.default)),
    *((op, (_P[0, 0, :, :4],)) for op in (aten.linalg_eigvals.default, aten._linalg_eigvals.default)),
    (aten._linalg_svd.default, (_F, False, False)), (aten._linalg_eigh.default, (_F.T @ _F, "U", False)),
    *((op, (a,)) for op in (aten._linalg_det.default, aten._linalg_slogdet.default)
      for a in (_M, _M.mT, _M[:, ::2, ::2])),
    (aten._cholesky_solve_helper.default, (_F[:, :1], torch.eye(2) + _F[:, :2].tril().abs(), False)),
    *((getattr(aten, f"_upsample_bi{n}2d_aa").vec, (_P, [3, 9], False, None)) for n in ("linear", "cubic")),
    (aten._upsample_bicubic2d_aa.default, (_P, [2, 3], True)),
    (aten._upsample_bicubic2d_aa_backward.default, (_P, [4, 6], [1, 2, 9, 4], False)),
    (aten._batch_norm_with_update_functional.default, (_P, None, None, _F[0, :2], _F[0, :2].abs(), 0.1, 1e-5)),
    (aten.batch_norm_backward.default,
     (_P, _P + 1, torch.ones(2), None, None, _F[0, :2], _F[1, :2].abs(), True, 1e-5, [True] * 3, _I.byte())),
    (aten.embedding_renorm.default, (_F, torch.tensor([1, 1]), 2.0, 2.0)), (aten.resize_as.default, (_F, _S)),
    (aten.resize.default, (_F, [2, 2])),
]  # fmt: skip
_KEYWORDS = {aten.div.Scalar_mode: {"rounding_mode": "floor"}, aten.scatter.value_reduce: {"reduce": "multiply"}}


@pytest.mark.parametrize("number", range(len(_NOT_REACHED)), ids=lambda n: f"{_NOT_REACHED[n][0]}-{n}")
def test_an_overload_that_opinfo_does_not_reach(number: int) -> None:
    op, args = _NOT_REACHED[number]
    kwargs = _KEYWORDS.get(op, {})
    result = op(*args, **kwargs)
    expected = list(result) if isinstance(result, (list, tuple)) else [result]
    for got, want in zip(_single(op, *args, **kwargs), expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_every_row_of_the_table_is_tested() -> None:
    tested = set(xla_samples.read_sources()) | {str(op) for op, _ in _NOT_REACHED}
    assert {str(op) for op in TABLE if isinstance(op, torch._ops.OpOverload)} <= tested


def test_every_core_operator_has_its_way() -> None:
    from torchport.backends.xla.coverage import core_operators, decompositions, way

    core = core_operators()
    assert len(core) > 180
    assert not [op for op in core if not way(op)[0]]
    assert not set(decompositions()) & set(TABLE)


def test_the_page_of_operators_is_fresh() -> None:
    from torchport.backends.xla.coverage import page

    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m torchport.backends.xla.coverage"
