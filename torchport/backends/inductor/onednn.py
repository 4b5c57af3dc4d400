"""Large matrix products by oneDNN, on processors for which MKL keeps to AVX2.

PyTorch multiplies float32 matrices with MKL, which uses its AVX-512 kernels on Intel's processors only. Measured on one
core of an AMD EPYC with AVX-512: MKL's ``sgemm`` reaches 100 GFLOP/s, oneDNN's 220 (256×256 by 256×1024); from two
million multiplications on oneDNN is faster in every layout (0.44 to 0.92 of the time), below a million slower, as it
takes 10 µs to begin.

Private torch APIs used here: ``torch._inductor.mkldnn_ir.LinearUnary`` and ``_create_output_node``,
``torch._inductor.lowering.permute``, ``torch._inductor.virtualized.V`` and ``torch._inductor.ir.ExternKernel``
(Inductor's own lowering of the operator wants the weight to be a constant).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from . import machine

__all__ = ["lower", "pays"]

aten = torch.ops.aten
ENOUGH: Final = 2_000_000
"""Multiplications from which on a product goes to oneDNN."""
_FEW: Final = 4
"""Rows or columns below which memory decides and not arithmetic."""


def pays() -> bool:
    """Whether products are faster by oneDNN here, and the user has not turned it off.

    It is asked when something is compiled; what was compiled before stays as it is.
    """
    found = torch.backends.mkldnn
    return machine.avx512_without_mkl() and found.is_available() and bool(found.enabled)


def lower(target: Any, args: Any, kwargs: Any) -> Any:
    """Inductor's IR for ``mm`` or ``addmm`` as a call of oneDNN; ``None`` where that does not pay."""
    if target is aten.mm.default and len(args) == 2 and not kwargs:
        bias, (x, weight) = None, args
    elif target is aten.addmm.default and len(args) == 3 and all(kwargs.get(n, 1) == 1 for n in ("beta", "alpha")):
        bias, x, weight = args
    else:
        return None
    if x.get_dtype() is not torch.float32:
        return None
    sizes = [*x.get_size(), weight.get_size()[1]]
    rows, inner, columns = map(_at_first, sizes)
    if min(rows, columns) < _FEW or rows * inner * columns < ENOUGH:
        return None
    if bias is not None and list(bias.get_size()) != [sizes[2]]:
        return None
    return _linear(x, weight, bias, (sizes[0], sizes[2]))


def _at_first(size: Any) -> int:
    """A size, or what a symbolic one is in the program's first call."""
    from torch._inductor.virtualized import V

    return V.graph.sizevars.optimization_hint(size)


def _linear(x: Any, weight: Any, bias: Any, shape: tuple[Any, Any]) -> Any:
    from torch._inductor import lowering
    from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
    from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node

    realize = ExternKernel.realize_input
    inputs = [realize(x), realize(lowering.permute(weight, [1, 0]))]
    constants: list[Any] = ["none", [-1], ""]
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(ExternKernel.require_contiguous(realize(bias)))
    layout = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=list(shape))
    made = LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
    return TensorBox.create(_create_output_node(made))
