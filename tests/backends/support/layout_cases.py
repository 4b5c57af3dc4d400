"""What is not a plain strided tensor, on a device: ways to make one, and what is done with it.

As a program, ``layout_cases.py GROUP…``, it runs groups in both modes and on two indices, and prints one JSON line per
case: its name and what came of it: ``"equal"`` (to the CPU's), ``"refused"`` (in torchport's words), or what is wrong.
A crash leaves the last case at ``"begun"``.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

Case = Callable[[torch.device], Any]
coo: Any = torch.sparse_coo_tensor  # its annotations do not know all that it takes
C = torch.tensor([[1.0, 0, 2], [0, 0, 3]])
FUNCTIONAL = torch.nn.functional


def _x(d: Any) -> torch.Tensor:
    return C.to(d)


def _i(d: Any, *values: Any) -> torch.Tensor:
    return torch.tensor(values).to(d)


def _loaded(value: Any, d: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location=d, weights_only=False)


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(C, 0.1, 0, torch.qint8)


def _with_buffer(value: torch.Tensor, d: Any) -> torch.Tensor:
    module: Any = torch.nn.Module()
    module.register_buffer("b", value)
    return module.to(d).b


def _default(d: Any) -> Any:
    torch.set_default_device(d)
    try:
        return coo([[0], [1]], [2.0], (2, 3)).to_dense()
    finally:
        torch.set_default_device(None)


def _gathered(d: Any) -> Any:
    weight = _x(d).clone().requires_grad_()
    torch.gather(weight, 0, torch.zeros(1, 3, dtype=torch.long).to(d), sparse_grad=True).sum().backward()
    return weight.grad


SPARSE: dict[str, Case] = {
    "csr": lambda d: torch.sparse_csr_tensor([0, 2, 3], [0, 2, 2], [1.0, 2, 3], (2, 3), device=d),
    "csr of tensors": lambda d: torch.sparse_csr_tensor(_i(d, 0, 1, 1), _i(d, 1), _x(d)[0, :1], (2, 3)),
    "csc": lambda d: torch.sparse_csc_tensor([0, 1, 1, 2], [0, 1], [1.0, 2], (2, 3), device=d),
    "bsr": lambda d: torch.sparse_bsr_tensor([0, 1], [0], [[[1.0, 2], [3, 4]]], (2, 2), device=d),
    "compressed": lambda d: torch.sparse_compressed_tensor(
        [0, 1, 1], [1], [1.0], (2, 3), layout=torch.sparse_csr, device=d
    ),
    "to_sparse of a layout": lambda d: _x(d).to_sparse(layout=torch.sparse_csr),
    "to_sparse_csr": lambda d: _x(d).to_sparse_csr(),
    "to_sparse_csc": lambda d: _x(d).to_sparse_csc(),
    "to_sparse_bsr": lambda d: torch.ones(4, 4).to(d).to_sparse_bsr((2, 2)),
    "to_sparse_bsc": lambda d: torch.ones(4, 4).to(d).to_sparse_bsc((2, 2)),
    "zeros": lambda d: torch.zeros(2, 3, layout=torch.sparse_csr, device=d),
    "zeros_like of a layout": lambda d: torch.zeros_like(_x(d), layout=torch.sparse_coo),
    "moved csr": lambda d: C.to_sparse_csr().to(d),
    "moved csc": lambda d: C.to_sparse_csc().to(d),
    "loaded csr": lambda d: _loaded(C.to_sparse_csr(), d),
    "sparse mask of the host": lambda d: _x(d).sparse_mask(C.to_sparse()),
    "host sparse plus": lambda d: _x(d) + C.to_sparse(),
    "csr product": lambda d: C.to_sparse_csr().to(d) @ _x(d).t(),
    "host csr product": lambda d: C.to_sparse_csr() @ _x(d).t(),
    "host coo product": lambda d: C.to_sparse() @ _x(d).t(),
    "copied from": lambda d: _x(d).copy_(C.to_sparse()),
    "spdiags": lambda d: torch.sparse.spdiags(torch.ones(1, 3).to(d), _i(d, 0), (3, 3)),
}


def _gradient_of_values(d: Any) -> Any:
    values = torch.tensor([1.0, 2.0]).to(d).requires_grad_()
    (coo(_i(d, [0, 1], [2, 1]), values, (2, 3)).to_dense() * _x(d)).sum().backward()
    return values.grad


def _gradient_of_a_product(d: Any) -> Any:
    dense = _x(d).t().clone().requires_grad_()
    (C.to_sparse().to(d) @ dense).square().sum().backward()
    return dense.grad


COO: dict[str, Case] = {
    "coo of tensors": lambda d: coo(_i(d, [0, 1], [2, 2]), _x(d)[:, 2], (2, 3)),
    "coo of tensors, sizes inferred": lambda d: coo(_i(d, [0, 1], [2, 2]), _x(d)[:, 2]),
    "coo of host tensors": lambda d: coo(_i("cpu", [0, 1], [2, 2]), C[:, 2], (2, 3), device=d),
    "coo of lists": lambda d: coo([[0, 1], [2, 2]], [1.0, 2.0], (2, 3), device=d),
    "coo without values": lambda d: torch.ops.aten._sparse_coo_tensor_with_dims(
        2, 0, (2, 3), device=d, layout=torch.sparse_coo
    ),
    "coo unchecked": lambda d: torch.ops.aten._sparse_coo_tensor_unsafe(_i(d, [0], [1]), _x(d)[0, :1], (2, 3)),
    "default device": _default,
    "to_sparse": lambda d: _x(d).to_sparse(),
    "to_sparse of dims": lambda d: _x(d).to_sparse(1),
    "empty": lambda d: torch.empty(2, 3, layout=torch.sparse_coo, device=d),
    "zeros_like": lambda d: torch.zeros_like(C.to_sparse(), device=d),
    "new_empty": lambda d: C.to_sparse().new_empty((2, 3), device=d),
    "moved coo": lambda d: C.to_sparse().to(d),
    "moved, not blocking": lambda d: C.to_sparse().to(d, non_blocking=True),
    "moved to another dtype": lambda d: C.to_sparse().to(d, torch.float64),
    "buffer": lambda d: _with_buffer(C.to_sparse(), d),
    "loaded coo": lambda d: _loaded(C.to_sparse(), d),
    "sparse mask": lambda d: _x(d).sparse_mask(C.to_sparse().to(d)),
    "host sparse product": lambda d: torch.sparse.mm(C.to_sparse().to(d), _x(d).t()),
    "gather": _gathered,
    "grad of to_sparse": lambda d: _x(d).clone().requires_grad_().to_sparse().sum().backward(),
    "product with a vector": lambda d: C.to_sparse().to(d) @ torch.ones(3).to(d),
    "sum": lambda d: (C.to_sparse().to(d).sum(), torch.sparse.sum(C.to_sparse().to(d), 0).to_dense()),
    "sum of two": lambda d: C.to_sparse().to(d) + C.to_sparse().to(d),
    "parts": lambda d: (C.to_sparse().to(d).indices(), C.to_sparse().to(d).values()),
    "coalesced": lambda d: coo(_i(d, [1, 0, 1], [2, 1, 2]), _x(d)[:, 2].sum().expand(3), (2, 3)).coalesce(),
    "added to a dense tensor": lambda d: _x(d).clone().add_(C.to_sparse().to(d), alpha=2),
    "rows": lambda d: _x(d).clone().add_(coo(_i(d, [1]), _x(d)[:1], (2, 3))),
    "a number": lambda d: _x(d)[0, 0].clone().add_(coo(torch.zeros(0, 1, dtype=torch.long).to(d), _x(d)[0, :1], ())),
    "multiplied in place": lambda d: C.to_sparse().to(d).mul_(3),
    "added to a sparse tensor": lambda d: C.to_sparse().to(d).add_(C.to_sparse().to(d)),
    "emptied": lambda d: C.to_sparse().to(d).zero_(),
    "deepcopy": lambda d: copy.deepcopy(C.to_sparse().to(d)),
    "saved": lambda d: _loaded(C.to_sparse().to(d), None),
    "resized as": lambda d: coo(size=(2, 3), device=d).resize_as_(C.to_sparse().to(d)),
    "gradient of values": _gradient_of_values,
    "gradient of a product": _gradient_of_a_product,
    "with itself": lambda d: C.to_sparse().to(d).mul(C.to_sparse().to(d)),
    "of no values": lambda d: torch.zeros(2, 3).to(d).to_sparse(),
    "complex": lambda d: torch.complex(C, C + 1).to_sparse().to(d).abs(),
}
"""Index 0 of the device holds these; another index refuses them."""
QUANTIZED: dict[str, Case] = {
    "per tensor": lambda d: torch.quantize_per_tensor(_x(d), 0.1, 0, torch.qint8),
    "per tensor of tensors": lambda d: torch.quantize_per_tensor(
        _x(d), torch.tensor(0.1).to(d), torch.tensor(0).to(d), torch.qint8
    ),
    "per channel": lambda d: torch.quantize_per_channel(
        _x(d), torch.tensor([0.1, 0.1]).to(d), _i(d, 0, 0), 0, torch.qint8
    ),
    "dynamic": lambda d: torch.quantize_per_tensor_dynamic(_x(d), torch.qint8, False),
    "moved": lambda d: _quantized().to(d),
    "loaded": lambda d: _loaded(_quantized(), d),
    "empty": lambda d: torch._empty_affine_quantized([2, 3], scale=0.1, zero_point=0, dtype=torch.qint8, device=d),
    "empty of a quantized type": lambda d: torch.empty(3, dtype=torch.qint8, device=d),
    "buffer": lambda d: _with_buffer(_quantized(), d),
}
ONEDNN: dict[str, Case] = {
    "to_mkldnn": lambda d: _x(d).to_mkldnn(),
    "moved": lambda d: C.to_mkldnn().to(d),
}
NESTED: dict[str, Case] = {
    "of host tensors": lambda d: torch.nested.nested_tensor([C, C[:1]], device=d).to_padded_tensor(0.0),
    "of tensors": lambda d: torch.nested.nested_tensor([_x(d), _x(d)[:1]]),
    "of lists": lambda d: torch.nested.nested_tensor([[1.0, 2], [3.0]], device=d),
    "as nested": lambda d: torch.nested.as_nested_tensor([_x(d), _x(d)[:1]]),
    "as nested, moved": lambda d: torch.nested.as_nested_tensor([C, C[:1]], device=d),
    "of one tensor": lambda d: torch.nested.as_nested_tensor(_x(d)),
    "moved": lambda d: torch.nested.nested_tensor([C, C[:1]]).to(d),
    "loaded": lambda d: _loaded(torch.nested.nested_tensor([C, C[:1]]), d),
    "view of a buffer": lambda d: torch.ops.aten._nested_view_from_buffer(
        _x(d).flatten(), torch.tensor([[1], [2]]), torch.tensor([[1], [1]]), torch.tensor([0, 1])
    ),
    "of a mask": lambda d: torch._nested_tensor_from_mask(_x(d)[None], torch.ones(1, 2, dtype=torch.bool).to(d)),
    "attention": lambda d: _attention(d),
}


def _jagged(d: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([C, C[:1]], layout=torch.jagged, device=d)


def _attention(d: Any) -> torch.Tensor:
    q = _jagged(d).unsqueeze(-2).transpose(1, 2)
    return FUNCTIONAL.scaled_dot_product_attention(q, q, q)


def _written(nested: torch.Tensor) -> torch.Tensor:
    nested = nested.clone()
    nested.values().mul_(2)
    nested.add_(1)
    return nested


def _through_padding(d: Any) -> Any:
    weight = _x(d).clone().requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(weight, _i(d, 0, 1, 2))
    (nested * 2).to_padded_tensor(0.0).square().sum().backward()
    return weight.grad


def _linear_grad(d: Any) -> Any:
    weight = torch.ones(4, 3).to(d).requires_grad_()
    nested = _jagged(d).requires_grad_()
    FUNCTIONAL.linear(nested, weight).relu().values().square().sum().backward()
    return weight.grad, nested.grad


def _inference(d: Any) -> Any:
    with torch.inference_mode():
        return FUNCTIONAL.linear(_jagged(d), torch.ones(4, 3).to(d)).relu()


JAGGED: dict[str, Case] = {
    "of host tensors": _jagged,
    "of tensors": lambda d: torch.nested.nested_tensor([_x(d), _x(d)[:1]], layout=torch.jagged),
    "as nested": lambda d: torch.nested.as_nested_tensor([_x(d), _x(d)[:1]], layout=torch.jagged),
    "of values": lambda d: torch.nested.nested_tensor_from_jagged(_x(d), _i(d, 0, 1, 2)),
    "of values with lengths": lambda d: torch.nested.nested_tensor_from_jagged(
        _x(d), _i(d, 0, 1, 2), lengths=_i(d, 1, 1)
    ).unbind(),
    "moved": lambda d: torch.nested.nested_tensor([C, C[:1]], layout=torch.jagged).to(d),
    "moved back": lambda d: [part.to(d) for part in _jagged(d).cpu().unbind()],
    "padded": lambda d: _jagged(d).to_padded_tensor(-1.0),
    "unbind": lambda d: _jagged(d).unbind(),
    "arithmetic": lambda d: (_jagged(d) * 2 - 1, _jagged(d) * torch.full((1, 1, 3), 2.0).to(d)),
    "softmax": lambda d: _jagged(d).softmax(-1),
    "layer norm": lambda d: FUNCTIONAL.layer_norm(_jagged(d), (3,)),
    "sum": lambda d: (_jagged(d).sum(-1), _jagged(d).sum(1), _jagged(d).sum()),
    "linear": lambda d: FUNCTIONAL.linear(_jagged(d), torch.ones(4, 3).to(d)),
    "linear's gradient": _linear_grad,
    "padding's gradient": _through_padding,
    "inference mode": _inference,
    "writes": lambda d: _written(_jagged(d)),
    "deepcopy": lambda d: copy.deepcopy(_jagged(d)),
    "saved": lambda d: _loaded(_jagged(d), None),
    "module": lambda d: torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.ReLU()).to(d)(_jagged(d)),
    "printed": lambda d: torch.tensor("NestedTensor(size=(2, j" in repr(_jagged(d))),
}


def _two(d: Any) -> TwoTensor:
    return TwoTensor(_x(d), _x(d) * 10)


def _two_gradient(d: Any) -> Any:
    weight = torch.ones(3, 2).to(d).requires_grad_()
    (_two(d) @ weight).square().sum().backward()
    return weight.grad


def _two_in_module(d: Any) -> Any:
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 3), torch.full((2, 3), 2.0)))
    layer.to(d)(_x(d)).sum().backward()
    return layer.weight, layer.weight.grad


def _two_written(d: Any) -> Any:
    two = _two(d).clone()
    two[0] = 5.0
    two.t()[1] += 1
    return two


def _masked(d: Any) -> Any:
    return torch.masked.masked_tensor(_x(d), _x(d) > 1)


class Plain(torch.Tensor):
    """A subclass without a dispatch of its own."""


OTHERS: dict[str, Case] = {
    "wrapper": lambda d: (_two(d) * 2 + _x(d), _two(d).t().sum(0), torch.cat([_two(d), _two(d)]), _two(d).chunk(2)),
    "wrapper written": _two_written,
    "wrapper's gradient": _two_gradient,
    "wrapper in a module": _two_in_module,
    "wrapper saved": lambda d: _loaded(_two(d), None),
    "wrapper copied": lambda d: copy.deepcopy(_two(d)),
    "masked": lambda d: (_masked(d) * 2).sum().get_data(),
    "masked mean": lambda d: _masked(d).mean(1).to_tensor(0.0),
    "conj": lambda d: (torch.complex(_x(d), _x(d)).conj() * 1j, torch.complex(_x(d), _x(d)).conj().imag),
    "neg view": lambda d: (torch._neg_view(_x(d)) + 1, torch._neg_view(_x(d)).resolve_neg()),
    "zero tensor": lambda d: torch._efficientzerotensor((2, 3), device=d) + _x(d),
    "empty strided": lambda d: torch.empty_strided((2, 3), (1, 7), device=d).fill_(1.0),
    "plain subclass": lambda d: _x(d).as_subclass(Plain) + 1,
    "made subclass": lambda d: torch.Tensor._make_subclass(Plain, _x(d)) + 1,
    "buffer": lambda d: torch.nn.Buffer(_x(d)) + 1,
    "vmap": lambda d: torch.vmap(lambda a: a.sum())(_x(d)),
    "packed sequence": lambda d: torch.nn.utils.rnn.pack_sequence([_x(d), _x(d)[:1]]).data,
}
COMPILED: dict[str, Case] = {
    "jagged": lambda d: torch.compile(lambda n, w: FUNCTIONAL.linear(n, w).relu() * 2, backend="torchport")(
        _jagged(d), torch.ones(4, 3).to(d)
    ),
    "wrapper": lambda d: torch.compile(lambda n, w: (n @ w).relu(), backend="torchport")(
        _two(d), torch.ones(3, 2).to(d)
    ),
}
REFUSED = {"sparse": SPARSE, "quantized": QUANTIZED, "onednn": ONEDNN, "nested": NESTED}
WORKING = {"coo": COO, "jagged": JAGGED, "others": OTHERS, "compiled": COMPILED}


def plain(value: Any) -> list[Any]:
    """A result as its class, layout and values, without the device."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, TwoTensor):
            found += ["TwoTensor", *plain([leaf.a, leaf.b])]
        elif isinstance(leaf, torch.Tensor) and leaf.is_nested:
            nested: Any = leaf
            found += ["nested", leaf.requires_grad, *plain([nested.values(), nested.offsets()])]
        elif isinstance(leaf, torch.Tensor):
            sparse = leaf.layout is torch.sparse_coo
            found += ["coalesced", leaf.is_coalesced()] if sparse else []
            held = (leaf.detach().to_dense() if sparse else leaf.detach()).cpu()
            found += [type(leaf).__name__, str(leaf.dtype), list(leaf.shape), leaf.requires_grad, held.tolist()]
        else:
            found.append(leaf)
    return found


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return abs(a - b) <= 1e-5 * (1 + abs(b)) if isinstance(a, (float, complex)) else a == b


def outcome(case: Case, device: torch.device, refused: bool) -> str:
    """What comes of a case on a device."""
    import torchport

    try:
        made = case(device)
        if refused:
            return f"made {type(made).__name__}"
        result, expected = plain(made), plain(case(torch.device("cpu")))
        if any(leaf.device.type != device.type for leaf in tree_leaves(made) if _is_elsewhere(leaf)):
            return "on another device"
        return "equal" if _close(result, expected) else f"{result} instead of {expected}"
    except torchport.TorchportError as error:
        return "refused" if refused and "strided tensors only" in str(error) else f"{type(error).__name__}: {error}"
    except NotImplementedError as error:  # PyTorch's own words
        return "refused" if refused and "Unsupported device type" in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _is_elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def main(groups: list[str]) -> None:
    """Run groups on index 0 in both modes and on another index."""
    import torchport

    warnings.simplefilter("ignore")
    torchport.use("reference")
    other = torchport.device("add_sub")
    for group in groups:
        cases = {**REFUSED, **WORKING}[group]
        for name, case in cases.items():
            for where, device, mode in (
                ("lazy", torch.device("port"), "lazy"),
                ("eager", torch.device("port"), "eager"),
                ("index", other, "lazy"),
            ):
                if group == "compiled" and where == "eager":
                    continue
                print(json.dumps([f"{group}: {name}, {where}", "begun"]), flush=True)
                with torchport.mode(mode):
                    refused = group in REFUSED or (group == "coo" and where == "index")
                    result = outcome(case, device, refused)
                print(json.dumps([f"{group}: {name}, {where}", result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
