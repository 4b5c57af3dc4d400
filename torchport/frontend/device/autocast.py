"""``torch.autocast("port")``: which operators compute in lower precision, which in float32, as on other devices.

PyTorch registers its cast policies per device in C++ and has none for Python-defined devices. The lists follow
``aten/src/ATen/autocast_mode.h``. Private torch API used here: ``torch._C._ExcludeDispatchKeyGuard``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...trace.handle import DEVICE_TYPE
from .opaque import opaque

__all__ = ["install"]

_LOWER: Final = [
    "_convolution",
    "_convolution.deprecated",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "linalg_vecdot",
    "scaled_dot_product_attention",
]
_FLOAT32: Final = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "norm.Scalar",
    "norm.names_ScalarOpt_dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "prod.dim_int",
    "cumprod",
    "cumsum",
    "softmax.int",
    "log_softmax.int",
    "sum",
    "sum.dim_IntList",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
]
_PROMOTE: Final = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "vdot",
    "cat",
    "stack",
]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if (
        isinstance(value, torch.Tensor)
        and value.dtype != dtype
        and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and value.device.type == DEVICE_TYPE
    ):
        return value.to(dtype)
    return value


def _widest(args: Any) -> torch.dtype:
    leaves: list[Any] = tree_leaves(args)
    wide = any(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in leaves)
    return torch.float32 if wide else torch.get_autocast_dtype(DEVICE_TYPE)


def _kernel(op: Any, choose: Callable[[Any], torch.dtype], keys: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = tree_map(lambda v: _cast(v, dtype), (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def install(libraries: list[torch.library.Library]) -> None:
    """Register the cast policies and add their libraries to ``libraries``. Operators on no list run unchanged."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    fallthrough = torch.library.Library("_", "IMPL")
    library = torch.library.Library("aten", "IMPL")
    libraries.extend((fallthrough, library))
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    policies: list[tuple[list[str], Callable[[Any], torch.dtype]]] = [
        (_LOWER, lambda _: torch.get_autocast_dtype(DEVICE_TYPE)),
        (_FLOAT32, lambda _: torch.float32),
        (_PROMOTE, _widest),
    ]
    for names, choose in policies:
        for name in names:
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if op is None:  # not in this version of PyTorch
                continue
            library.impl(name, opaque(_kernel(op, choose, keys)), "AutocastPrivateUse1")
