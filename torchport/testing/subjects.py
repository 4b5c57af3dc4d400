"""What can be run: PyTorch's operators, modules and optimizers, and the model suite, under one interface."""

from __future__ import annotations

import contextlib
import copy
import re
from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import torch_api, zoo
from .frontends import Place
from .plan import DTYPES, Subject, seed_of
from .torch_api import default_generators_seeded, dtype_of
from .variants import RUNNERS, put

__all__ = ["Runnable", "catalogue", "find", "shown"]

_UNDEFINED_VALUES = re.compile(r"^((new_)?empty(_like|_strided|_permuted)?|resize_(as_)?)$")
_EDGES_PER_KIND: Final = 3
_STEPS: Final = 3


def shown(value: Any) -> str:
    """Arguments as short text: tensors by dtype and shape."""

    def leaf(item: Any) -> Any:
        return _Text(f"{str(item.dtype)[6:]}{list(item.shape)}") if isinstance(item, torch.Tensor) else item

    return repr(tree_map(leaf, value))[:300]


class _Text(str):
    """Text whose repr has no quotes."""

    def __repr__(self) -> str:
        return str(self)


class Runnable(ABC):
    """Something with samples that runs at a :class:`Place`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def describe(self) -> Subject:
        """Name, dtypes and variants."""

    @abstractmethod
    def samples(self, variant: str, dtype: torch.dtype, seed: int) -> list[Any]:
        """The samples of a variant, the same for the same seed."""

    @abstractmethod
    def run(self, variant: str, dtype: torch.dtype, sample: Any, place: Place, seed: int) -> Any:
        """Nested results to compare."""

    def arguments(self, sample: Any) -> str:
        """The sample as short text."""
        return shown(sample)

    def tolerances(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        """(rtol, atol) pairs that PyTorch's own tests use."""
        return ()

    @property
    def values_undefined(self) -> bool:
        """Whether results are memory nobody wrote to."""
        return False


class OpInfoOperator(Runnable):
    """An entry of ``op_db``."""

    def __init__(self, name: str, op: Any) -> None:
        super().__init__(name)
        self.op = op

    def describe(self) -> Subject:
        dtypes = tuple(d for d in DTYPES if self.op.supports_dtype(dtype_of(d), "cpu"))
        has = {
            "backward": self.op.supports_autograd,
            "forward_ad": self.op.supports_autograd and self.op.supports_forward_ad,
            "inplace": self.op.get_inplace() is not None,
            "out": self.op.supports_out,
            "error": self.op.error_inputs_func is not None,
        }
        return Subject(self.name, dtypes, tuple(v for v in RUNNERS if has.get(v, True)))

    def _differentiable(self, dtype: torch.dtype) -> bool:
        return dtype in self.op.supported_backward_dtypes("cpu") and (dtype.is_floating_point or dtype.is_complex)

    def samples(self, variant: str, dtype: torch.dtype, seed: int) -> list[Any]:
        if variant == "error":
            return torch_api.error_inputs(self.op, seed)
        if variant == "edge":
            return self._edges(dtype, seed)
        if variant in ("backward", "forward_ad"):
            return torch_api.sample_inputs(self.op, dtype, True, seed) if self._differentiable(dtype) else []
        samples = torch_api.sample_inputs(self.op, dtype, False, seed)
        if variant == "inplace":
            return [sample for sample in samples if not sample.broadcasts_input]
        if variant == "view":
            views = [s for s in samples if isinstance(s.input, torch.Tensor) and s.input.dim()]
            return [s for s in views if s.input.layout is torch.strided]
        if variant == "noncontiguous":
            return [s for s in samples if any(isinstance(x, torch.Tensor) for x in tree_leaves(_given(s)))]
        return samples

    def _edges(self, dtype: torch.dtype, seed: int) -> list[Any]:
        """Samples with an empty tensor (made so if there is none), with 0-dim ones, with shapes that broadcast."""
        kinds: dict[str, list[Any]] = {"empty": [], "0-dim": [], "broadcast": []}
        for sample in torch_api.reference_inputs(self.op, dtype, seed):
            kind = _edge_kind(sample)
            if kind and len(kinds[kind]) < _EDGES_PER_KIND:
                kinds[kind].append(sample)
        if not kinds["empty"]:
            kinds["empty"] = self._emptied(torch_api.sample_inputs(self.op, dtype, False, seed))
        return [sample for found in kinds.values() for sample in found]

    def _emptied(self, samples: list[Any]) -> list[Any]:
        """The first sample without its rows: every tensor with the input's first dimension, emptied there."""
        first = next((s for s in samples if isinstance(s.input, torch.Tensor) and s.input.dim()), None)
        if first is None or first.input.layout is not torch.strided:
            return []
        rows = first.input.shape[0]

        def empty(leaf: Any) -> Any:
            strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            return leaf[:0] if strided and leaf.dim() and leaf.shape[0] == rows else leaf

        input_, args, kwargs = tree_map(empty, _given(first))
        return [torch_api.SampleInput(input_, args=tuple(args), kwargs=kwargs)]

    def run(self, variant: str, dtype: torch.dtype, sample: Any, place: Place, seed: int) -> Any:
        return RUNNERS[variant](self.op, sample, place, seed)

    def arguments(self, sample: Any) -> str:
        args = ", ".join(shown(value) for value in (sample.input, *sample.args))
        return (args + "".join(f", {name}={shown(value)}" for name, value in sample.kwargs.items()))[:400]

    def tolerances(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        return tuple(torch_api.tolerances(self.op, dtype))

    @property
    def values_undefined(self) -> bool:
        return _UNDEFINED_VALUES.search(self.op.name) is not None


def _given(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


def _edge_kind(sample: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(_given(sample)) if isinstance(leaf, torch.Tensor)]
    if any(t.numel() == 0 for t in tensors):
        return "empty"
    if any(t.dim() == 0 for t in tensors):
        return "0-dim"
    return "broadcast" if len({t.shape for t in tensors}) > 1 else ""


class Module(Runnable):
    """An entry of ``module_db``: forward in evaluation mode, and forward and backward in training mode."""

    def __init__(self, name: str, info: Any) -> None:
        super().__init__(f"module:{name}")
        self.info = info

    def describe(self) -> Subject:
        return Subject(self.name, tuple(d for d in DTYPES if dtype_of(d) in self.info.dtypes), ("forward", "training"))

    def samples(self, variant: str, dtype: torch.dtype, seed: int) -> list[Any]:
        samples = torch_api.module_inputs(self.info, dtype, variant == "training", seed)
        return [sample for sample in samples if sample.forward_input is not None]

    def run(self, variant: str, dtype: torch.dtype, sample: Any, place: Place, seed: int) -> Any:
        made, given = sample.constructor_input, sample.forward_input
        default_generators_seeded(seed)
        module = self.info.module_cls(*made.args, **made.kwargs).to(dtype)
        module = module.to(place.device).train(variant == "training")
        args, kwargs = put((given.args, given.kwargs), place.device)
        default_generators_seeded(seed)
        if variant == "forward":
            with torch.no_grad():
                return place.call(module, *args, **kwargs), dict(module.named_buffers())
        result = place.call(module, *args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.full_like(t, 0.5) for t in outputs])
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        return result, [t.grad for t in (*leaves, *module.parameters())], dict(module.named_buffers())

    def arguments(self, sample: Any) -> str:
        made, given = sample.constructor_input, sample.forward_input
        return f"({shown((*made.args, made.kwargs))})({shown((*given.args, given.kwargs))})"


class Optimizer(Runnable):
    """An entry of ``optim_db``: three steps on two parameters with given gradients."""

    def __init__(self, name: str, info: Any) -> None:
        super().__init__(f"optim:{name}")
        self.info = info

    def describe(self) -> Subject:
        return Subject(self.name, ("float32", "float64"), ("step",))

    def samples(self, variant: str, dtype: torch.dtype, seed: int) -> list[Any]:
        return torch_api.optimizer_inputs(self.info)

    def run(self, variant: str, dtype: torch.dtype, sample: Any, place: Place, seed: int) -> Any:
        default_generators_seeded(seed)
        start = [torch.randn(4, 3, dtype=dtype), torch.randn(3, 2, dtype=dtype)]
        gradients = [[torch.randn_like(p) for p in start] for _ in range(_STEPS)]
        params = [put(p, place.device).requires_grad_() for p in start]
        optimizer = self.info.optim_cls(params, **copy.deepcopy(sample.kwargs))
        for grads in gradients:
            for p, g in zip(params, grads, strict=True):
                there = put(g, place.device)
                p.grad = there.to_sparse() if self.info.only_supports_sparse_grads else there

            def closure() -> Any:
                # Only read by optimizers that evaluate the loss more than once.
                loss = sum((p * p).sum() for p in params)
                for p in params:
                    p.grad = 2 * p.detach()
                return loss

            optimizer.step(closure if self.info.step_requires_closure else None)
        return [p.detach() for p in params]

    def arguments(self, sample: Any) -> str:
        return shown(sample.kwargs)


class Model(Runnable):
    """A model of the suite (:mod:`.zoo`): its outputs, and its loss and gradients."""

    def __init__(self, name: str) -> None:
        super().__init__(f"model:{name}")
        self.short = name

    def describe(self) -> Subject:
        return Subject(self.name, ("float32",), ("forward", "training"))

    def samples(self, variant: str, dtype: torch.dtype, seed: int) -> list[Any]:
        return [self.short]

    def run(self, variant: str, dtype: torch.dtype, sample: Any, place: Place, seed: int) -> Any:
        example = zoo.build(sample)
        model = example.model.train(variant == "training").to(place.device)
        batch = zoo.moved(example.batch, place.device)
        if variant == "forward":
            with torch.no_grad():
                return place.call(lambda b: example.forward(model, b), batch)
        loss = place.call(lambda b: example.loss(model, b), batch)
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters()}

    def tolerances(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        return ((1e-3, 1e-4),)

    def arguments(self, sample: Any) -> str:
        return sample


def find(name: str) -> Runnable:
    """The runnable of a name, as in a report. Raises ``KeyError``."""
    kind, _, rest = name.partition(":")
    if rest and kind == "module":
        return Module(rest, torch_api.modules()[rest])
    if rest and kind == "optim":
        return Optimizer(rest, torch_api.optimizers()[rest])
    if rest and kind == "model":
        if rest not in zoo.ZOO:
            raise KeyError(name)
        return Model(rest)
    return OpInfoOperator(name, torch_api.operators()[name])


def catalogue() -> list[Subject]:
    """Everything there is."""
    names = [*torch_api.operators(), *(f"module:{n}" for n in torch_api.modules())]
    names += [f"optim:{n}" for n in torch_api.optimizers()]
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401 - pyright: ignore[reportUnusedImport]

        names += [f"model:{n}" for n in zoo.ZOO]
    return [find(name).describe() for name in names]


def sample_seed(case_parts: tuple[object, ...], seed: int) -> int:
    """The seed a case runs with: a function of the case without its frontend, so that frontends draw alike."""
    return seed_of(*case_parts, seed)
