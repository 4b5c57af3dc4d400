"""``torchport.backend.decompositions``: attention as the CPU's own kernel computes it, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchport.backend.builder import Capture, GraphBuilder
from torchport.backend.decompositions import OTHERWISE
from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import TensorSpec

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float64: 1e-8}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_attention_is_the_kernels(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for groups, turned, scale in itertools.product((1, 2), (False, True), (None, 0.3)):
        query = torch.randn(2, 5, 4, 8, dtype=dtype).transpose(1, 2) if turned else torch.randn(2, 4, 5, 8, dtype=dtype)
        key, value = torch.randn(2, 2, 4 // groups, 5 if kind == "causal" else 7, 8, dtype=dtype)
        mask = torch.randn(2, 1, 5, 7, dtype=dtype) if kind == "mask" else None
        if mask is not None:
            mask[0, 0, 0] = -torch.inf  # a query that sees no key
        how = {"attn_mask": mask, "scale": scale}
        theirs = FORWARD(query, key, value, 0.0, kind == "causal", **how)
        ours = OTHERWISE[FORWARD](query, key, value, 0.0, kind == "causal", **how)
        for got, want in zip(ours, theirs, strict=True):
            assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        torch.testing.assert_close(ours[0], theirs[0], **close)
        if mask is None:
            torch.testing.assert_close(ours[1], theirs[1], **close)
        if groups == 1 and mask is None:
            rest = (torch.randn_like(theirs[0]), query, key, value, *theirs, 0.0, kind == "causal")
            for got, want in zip(OTHERWISE[BACKWARD](*rest, **how), BACKWARD(*rest, **how), strict=True):
                torch.testing.assert_close(got, want, **close)
                assert got.stride() == want.stride()


def test_it_is_what_a_backend_without_the_kernel_gets() -> None:
    class Without(ReferenceBackend):
        name = "without"

        def supports(self, node: torch.fx.Node) -> object:
            from torchport import Support

            return Support.no("no attention") if node.target in OTHERWISE else Support.yes()

    backend = Without()  # a capture does not keep it
    builder = GraphBuilder(Capture(backend), strict=True)
    spec = TensorSpec((2, 4, 5, 8), torch.float32, (160, 40, 8, 1))
    query, key, value = (builder.placeholder(name, spec) for name in "qkv")
    result, logsumexp = builder(FORWARD, query, key, value)
    assert [tuple(builder.val(one).shape) for one in (result, logsumexp)] == [(2, 4, 5, 8), (2, 4, 5)]
    grads = builder(BACKWARD, query, query, key, value, result, logsumexp, 0.0, False)
    assert [tuple(builder.val(one).shape) for one in grads] == [(2, 4, 5, 8)] * 3
    assert not {node.target for node in builder.graph.nodes} & set(OTHERWISE)
