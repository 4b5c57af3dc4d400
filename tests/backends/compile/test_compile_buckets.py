"""torch.compile(..., options={"buckets": ...}): few computations for many shapes, values as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import torchport
from torchport import metrics
from torchport.core import releases

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SIZES = (3, 5, 9, 13, 7, 16, 17, 30)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    b, t, c = x.shape
    q, k, v = (x @ weight).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) / 2 + bias[:, None, None, :]
    later = torch.ones(t, t, dtype=torch.bool).tril().logical_not()
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)


def _self_attention(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 4, batch_first=True).eval()(x, x, x, need_weights=False)[0]


def _images(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return net.eval()(x)


Make = Callable[[int], tuple[torch.Tensor, ...]]
TABLE, PLACES, WEIGHT = rand(50, 16), rand(64, 16, seed=1), rand(16, 48, seed=2)
ROWS: Make = lambda n: (rand(n, 4),)  # noqa: E731
EXACT: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "elementwise": (lambda x: (x * 2).sin() + 1, ROWS, 0),
    "reductions": (lambda x: (x.sum(), x.sum(0), x.mean(1), x.mean(), x.amax(0), x.argmax(0), x.amin()), ROWS, 0),
    "softmax": (lambda x: (x.softmax(0), x.softmax(1), x.log_softmax(0)), ROWS, 0),
    "what is beyond is no number": (lambda x: ((1 / x).sum(0), x.exp().log().mean(0)), ROWS, 0),
    "products": (lambda x: (x.t() @ x, x @ x.t(), (x @ x.t()).softmax(-1) @ x), ROWS, 0),
    "views": (lambda x: (x.t() * 2, x.t().contiguous().sum(0), x.reshape(-1) * 2, x[None].sum(1)), ROWS, 0),
    "two sizes": (lambda x, y: (x[:, None] - y[None]).abs().sum(), lambda n: (rand(n), rand(n + 2)), 0),
    "join": (lambda x: torch.cat([x, x * 2], 1).sum(0), ROWS, 0),
    "integers": (
        lambda x: (x.sum(0), x.amax(0), x.amin(), x.prod(0)),
        lambda n: (torch.arange(3 * n).view(n, 3) % 5,),
        0,
    ),
    "bools": (lambda x: (x.any(0), x.all(0), (~x).all()), lambda n: (rand(n, 3) > 0,), 0),
    "bools, the largest": (
        lambda x: (x.amax(0), x.amin(0), x.max(0), x.min(0)[0]),
        lambda n: (rand(n, 3) > 0,),
        0,
    ),
    "division of integers": (
        lambda x, y: (x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc").sum(0)),
        lambda n: (torch.arange(3 * n).view(n, 3), torch.arange(3 * n).view(n, 3) % 5 + 2),
        0,
    ),
    "numbers that are sizes": (
        lambda x: (x * x.shape[0], x.sum(0) / (3 * x.shape[0]), (x.double() / x.shape[0]).sum()),
        lambda n: (rand(n, 3),),
        0,
    ),
    "losses of classes": (
        lambda x, y: (
            nn.functional.cross_entropy(x, y),
            nn.functional.cross_entropy(x, y, reduction="sum"),
            nn.functional.cross_entropy(x, y, reduction="none"),
            nn.functional.nll_loss(x, y, ignore_index=1),
        ),
        lambda n: (rand(n, 5), torch.arange(n) % 5),
        0,
    ),
    "rows of two dimensions": (
        lambda x: (x.reshape(-1, 3).softmax(0).sum(0), x.reshape(-1, 3).mean(0)),
        lambda n: (rand(2, n, 3),),
        1,
    ),
    "ends": (lambda x: (x[-1], x[-2] + x[1], torch.cat([x, x * 2]).sum(0), torch.stack([x, x.exp()]).mean(1)), ROWS, 0),
    "half": (lambda x: (x.mean(0), x.sum(0)), lambda n: ((rand(n, 3) * 8).round().bfloat16(),), 0),
    "embedding": (
        lambda i: (nn.functional.embedding(i, TABLE) + PLACES[: i.shape[1]]).cumsum(1)[:, 0],
        lambda n: (torch.arange(2 * n).view(2, n) % 50,),
        1,
    ),
    "attention": (lambda x, b: attention(x, WEIGHT, b), lambda n: (rand(2, n, 16), rand(2, n)), 1),
    "fused attention": (_self_attention, lambda n: (rand(2, n, 16),), 1),
    "images": (_images, lambda n: (rand(n, 3, 8, 8),), 0),
}
"""Name → (function, arguments for a size, which dimension has that size)."""


MORE = {"two sizes": 5, "images": 4}
"""Buckets where there are more than three: pairs of sizes, and where Dynamo makes a second graph."""


OTHER_STRIDES = (_self_attention,) if releases.version() < (2, 13) else ()
"""What Dynamo itself gives other strides than eager mode (``backend="eager"``): it leaves out the fast path."""


def check(fn: Callable[..., Any], make: Make, dim: int, backend: str, sizes: tuple[int, ...] = SIZES) -> None:
    run = torch.compile(fn, backend="torchport", options={"backend": backend, "buckets": True})
    with torch.no_grad():
        for n in sizes:
            args = make(n)
            for arg in args:
                torch._dynamo.mark_dynamic(arg, dim)
            ours, theirs = run(*args), fn(*args)
            ours, theirs = (tree_leaves(one) for one in (ours, theirs))
            for got, want in zip(ours, theirs, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
                assert got.stride() == want.stride() or fn in OTHER_STRIDES


@pytest.mark.parametrize("name", EXACT)
def test_padding_changes_nothing(name: str, backend: str) -> None:
    """Sizes from 3 to 30 are three buckets: 8, 16 and 32."""
    fn, make, dim = EXACT[name]
    check(fn, make, dim, backend)
    assert metrics.counter("ExactShapes") == 0
    assert metrics.counter("BucketCompile") == MORE.get(name, 3)
    assert metrics.counter("CompileFrontend") == 0


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.flip(0), "aten.flip.default has no rule"),
        (lambda x: x.t().reshape(-1)[-1] + 1, "one place of the padded dimension"),
        (lambda x: x * ((x.shape[0] + 1) // 2), "a number is computed from a size"),
        (lambda x: x.clamp(max=min(x.shape[0], 5)), "a number is computed from a size"),
        (lambda x: torch.arange((x.shape[0] + 1) // 2), "a size is computed from one that changes"),
        (lambda x: torch.arange(x.shape[0], x.shape[0] + 4) * x, "a number is computed from a size"),
        (lambda x: torch.cat([x, x[:1]]).sum(0), "a size is computed from one that changes: .*aten.cat.default"),
        (lambda x: x.t().reshape(-1).argmax(0), "a place in a padded tensor as one number"),
        (lambda x: x.t().reshape(-1).max(0).indices, "a place in a padded tensor as one number"),
        (lambda x: x.argmax(keepdim=True), "a place in a padded tensor as one number"),
        (lambda x: x.t().reshape(-1).gather(0, torch.tensor([0, 11])), "places in a dimension of several"),
        (lambda x: x[1:].sum(0), "a part of the padded dimension|computed from one that changes"),
        (lambda x: x.var(0), "has no rule"),
        (
            lambda x: x.reshape(2, -1).sum(1),
            "cuts the padded dimension|keep the padded dimension|computed from one that changes",
        ),
    ],
)
def test_where_it_would_each_shape_is_compiled_and_that_is_said(fn: Callable[..., Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=f"each set of shapes is compiled for itself, not in buckets: .*({reason})"):
        check(fn, ROWS, 0, "reference", (4, 6, 10))
    assert metrics.counter("ExactShapes") == 1
    assert metrics.counter("BucketCompile") == 0
    assert metrics.counter("CompileFrontend") == 3


def test_training(backend: str) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    ours = copy.deepcopy(theirs)
    run = torch.compile(ours, backend="torchport", options={"backend": backend, "buckets": True}, dynamic=True)
    for n in SIZES:
        x = rand(n, 8)
        for model, call in ((theirs, theirs), (ours, run)):
            model.zero_grad()
            call(x).square().mean().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert metrics.counter("BucketCompile") == 6  # three forwards, three backwards
    assert metrics.counter("ExactShapes") == 0


def test_sizes_of_ones_own_and_beyond_the_largest() -> None:
    fn = lambda x: x.sum(0)  # noqa: E731
    run = torch.compile(fn, backend="torchport", options={"backend": "reference", "buckets": [20, 10]})
    for n, padded, exact in ((4, 1, 0), (10, 1, 0), (15, 2, 0), (25, 2, 1), (25, 2, 1), (26, 2, 2)):
        x = rand(n, 7)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), fn(x))
        assert (metrics.counter("BucketCompile"), metrics.counter("CompileFrontend")) == (padded, exact)


def test_the_option_is_checked_and_says_where_it_is_for() -> None:
    for wrong in ("yes", [], [1], ["8"], 8):
        with pytest.raises(Exception, match=r'option "buckets" is .*, but must be True, or a list'):
            torch.compile(lambda x: x + 1, backend="torchport", options={"buckets": wrong})(rand(3))
        torch.compiler.reset()
    torchport.use("reference")
    run = torch.compile(lambda x: x + 1, backend="torchport", options={"buckets": True}, dynamic=True)
    with pytest.warns(UserWarning, match="the tensors are on port:0"):
        run(rand(3, 4).to("port"))


def test_a_static_graph_needs_no_buckets() -> None:
    run = torch.compile(lambda x: x.flip(0), backend="torchport", options={"buckets": True}, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(rand(3))
    assert metrics.counter("ExactShapes") == 0
