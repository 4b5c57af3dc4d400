"""What the device takes and refuses, compared with the CPU: operators on drawn arguments, and PyTorch's error inputs.

A case calls one operator with the same arguments on both. Both have to give the same values, or both have to refuse at
the call. Arguments are drawn from what programs get wrong: numbers that do not fit a dtype, dtypes that do not mix,
expanded and overlapping tensors, results on another device, 0-dim CPU tensors.

Run a larger part than the tests do::

    python tests/backends/support/refusals.py --per-operator 40 --seed 1 --show 3
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

os.environ.setdefault("TORCHPORT_BACKEND", "reference")

import torch

DTYPES: Final = (
    torch.float32, torch.float32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.int32,
    torch.uint8, torch.int8, torch.complex64,
)  # fmt: skip
NUMBERS: Final = (
    True, False, 0, 1, 2, -1, 3, 300, -200, 2**31, 2**40, 0.0, 1.0, 1.5, -0.5, 70000.0, 1e30, 1e300, -1e300,
    float("inf"), float("nan"), 1j, 1 + 0j, complex(1e300, 0),
)  # fmt: skip
REAL: Final = tuple(value for value in NUMBERS if not isinstance(value, complex))
SMALL: Final = tuple(value for value in NUMBERS if not abs(value) > 300)
_COUNTING: Final = {"aten::arange", "aten::range"}
"""Operators whose numbers say how long the result is."""
KINDS: Final = (
    "plain", "plain", "plain", "scalar", "row", "expanded", "transposed", "empty", "host scalar", "same", "shifted",
    "detached", "one",
)  # fmt: skip
WORDS: Final = {
    "rounding_mode": ("trunc", "floor", "nearest", None),
    "reduce": ("sum", "prod", "mean", "amax", "amin", "add"),
    "indexing": ("ij", "xy"),
    "interpolation": ("linear", "lower", "nearest"),
    "side": ("left", "right"),
    "approximate": ("none", "tanh"),
    "ord": ("fro", "nuc"),
    "UPLO": ("L", "U"),
    "mode": ("reduced", "complete", "r"),
}

LEFT_OUT: Final = frozenset({
    "align_as", "align_tensors", "align_to", "allclose", "backward", "ccol_indices", "choose_qparams_optimized",
    "choose_qparams_per_token", "coalesce", "col_indices", "crow_indices", "cudnn_is_acceptable", "data",
    "dense_dim", "dequantize", "equal", "from_file", "get_device", "hash_tensor", "hspmm", "indices", "int_repr",
    "is_nonzero", "is_pinned", "is_set_to", "item", "lift", "lift_fresh", "nuclear_norm", "output_nr", "pin_memory",
    "q_per_channel_axis", "q_per_channel_scales", "q_per_channel_zero_points", "q_scale", "q_zero_point", "qscheme",
    "record_stream", "refine_names", "rename", "rename_", "requires_grad_", "resize", "resize_", "resize_as",
    "resize_as_", "retain_grad", "row_indices", "set", "set_", "set_data", "slice_inverse", "smm", "sparse_dim",
    "sparse_mask", "sparse_resize_", "sparse_resize_and_clear_", "sspaddmm", "swapaxes_", "to_dense", "to_mkldnn",
    "to_padded_tensor", "to_sparse", "to_sparse_bsc", "to_sparse_bsr", "to_sparse_csc", "to_sparse_csr",
    "unsafe_chunk", "values",
})  # fmt: skip
"""Operators that change what a tensor is, give no tensor, or are of other kinds of tensors."""


_INTERNAL: Final = ("quant", "fbgemm", "lstm", "gru_", "rnn_", "mkldnn", "cudnn", "miopen", "sparse", "q_per", "cslt")
"""In the names of operators that end the process on the CPU when their arguments are wrong, or that are of other kinds
of tensors."""


# -- arguments: descriptions, so that both devices get the same ------------------------------------------------------
@dataclass(frozen=True)
class Given:
    """A tensor to be made: its dtype, its kind (see :meth:`Maker.tensor`) and the seed of its values."""

    dtype: torch.dtype
    kind: str
    seed: int
    written: bool = False

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.kind}"


class There:
    """The device of the run, as the value of ``device=``."""

    def __repr__(self) -> str:
        return "there"


class Maker:
    """Makes a case's tensors on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.first: torch.Tensor | None = None
        self.bases: dict[torch.dtype, torch.Tensor] = {}
        self.made: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """An argument on the device."""
        if isinstance(value, Given):
            tensor = self.tensor(value)
            self.first = tensor if self.first is None else self.first
            self.made.append(tensor)
            return tensor
        if isinstance(value, There):
            return self.device
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(item) for item in value)
        return value

    def tensor(self, given: Given) -> torch.Tensor:
        """A tensor as described; ``same`` is the first one again, ``shifted`` another view of one memory."""
        kind, dtype = given.kind, given.dtype
        if kind == "same" and self.first is not None:
            return self.first
        if kind == "shifted":
            base = self.bases.get(dtype)
            if base is None:
                base = self.bases[dtype] = self.values((3, 3), given)
                return base[1:]
            return base[:2]
        shapes = {"scalar": (), "host scalar": (), "row": (3,), "expanded": (1, 3), "transposed": (3, 2)}
        shapes |= {"empty": (0, 3), "detached": (3, 3), "one": (1,)}
        made = self.values(shapes.get(kind, (2, 3)), given)
        if kind == "expanded":
            return made.expand(2, 3)
        if kind == "transposed":
            return made.t()
        if kind == "detached":
            return made[1:].detach()
        return made

    def values(self, shape: Sequence[int], given: Given) -> torch.Tensor:
        """Small whole numbers: they are valid as indices, and the same in every dtype."""
        data = random.Random(given.seed)
        count = torch.Size(shape).numel()
        host = torch.tensor([data.randrange(2) for _ in range(count)], dtype=torch.int64).reshape(shape).to(given.dtype)
        host = host.clone()  # no view
        return host if given.kind == "host scalar" else host.to(self.device)


# -- one case --------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """A call, made anew on each device: ``call(maker)`` gives what is to be compared."""

    group: str
    name: str
    text: str
    call: Callable[[Maker], Any]
    compare_values: bool = True
    uses: list[Any] = field(default_factory=list[Any])


@dataclass(frozen=True)
class Outcome:
    """What came of a call: values, or an error and whether it came with the call or with the read."""

    values: tuple[Any, ...] | None
    when: str = ""
    error: str = ""

    @property
    def kind(self) -> str:
        """The name of the error's class."""
        return self.error.partition(":")[0]


def _read(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return tuple(_read(item) for item in value)
    return value


def _error(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"


def run(case: Case, device: str) -> Outcome:
    """The outcome of a case on a device. The arguments count among the results: some are written to."""
    maker = Maker(device)
    try:
        result = case.call(maker)
    except Exception as error:
        return Outcome(None, "call", _error(error))
    try:
        return Outcome((_read(result), *(_read(value) for value in maker.made)))
    except Exception as error:
        return Outcome(None, "read", _error(error))


def _same(got: Any, want: Any, values: bool) -> bool:
    if isinstance(want, tuple):
        return isinstance(got, tuple) and len(got) == len(want) and all(map(_same, got, want, [values] * len(want)))
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
            return False
        if not values or got.layout != torch.strided or want.layout != torch.strided:
            return True
        tolerance = 2e-2 if want.dtype in (torch.float16, torch.bfloat16) else 1e-3
        return torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    return got == want or not values or (got != got and want != want)


_KIN: Final = {"NotImplementedError": "RuntimeError", "UnsupportedOp": "RuntimeError", "DeviceMismatch": "RuntimeError"}


def judge(case: Case, cpu: Outcome, port: Outcome) -> str:
    """``same``, or how the device differs from the CPU."""
    if cpu.values is None and port.values is None:
        if port.when == "read":
            return "refused late"
        return "same" if _KIN.get(cpu.kind, cpu.kind) == _KIN.get(port.kind, port.kind) else "another error"
    if cpu.values is None:
        return "accepted"
    if port.values is None:
        if port.when == "read":
            return "fails when read"
        return "refused in words" if port.kind in ("UnsupportedOp", "DeviceMismatch") else "refused"
    return "same" if _same(port.values, cpu.values, case.compare_values) else "another value"


# -- operators with drawn arguments ----------------------------------------------------------------------------------
def operators() -> list[Any]:
    """Overloads of ATen that Python programs call by name, in the order of their names."""
    found: list[Any] = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        if not full.startswith("aten::"):
            continue
        base, _, overload = full.removeprefix("aten::").partition(".")
        dunder = base.startswith("__")
        if any(word in base for word in _INTERNAL):
            continue
        if base in LEFT_OUT or (base.startswith("_") and not dunder) or "dimname" in overload or "names" in overload:
            continue
        if not hasattr(torch.Tensor, base) and not hasattr(torch, base):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and op._schema.returns:
            found.append(op)
    return found


class NotDrawn(Exception):
    """An argument of a type that this sweep has no values for."""


class Drawer:
    """Draws the arguments of one call."""

    def __init__(self, op: Any, data: random.Random) -> None:
        self.op = op
        self.data = data
        self.dtype = data.choice(DTYPES)
        self.has_tensor = any("Tensor" in str(a.real_type) for a in op._schema.arguments if not a.is_out)

    def argument(self, argument: Any) -> Any:
        """The value of an argument, a :class:`Given` for a tensor."""
        kind, name, data = str(argument.real_type), argument.name, self.data
        if kind.startswith("Optional["):
            if data.random() < 0.5:
                return None
            kind = kind.removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            return self.tensor(argument)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            return [self.tensor(argument) for _ in range(data.choice((1, 2, 2)))]
        plain: dict[str, Callable[[], Any]] = {
            "number": lambda: data.choice(SMALL if self.op._schema.name in _COUNTING else NUMBERS),
            "float": lambda: data.choice(REAL if data.random() < 0.3 else (0.5, 1.0, 0.0, 2.0)),
            "bool": lambda: data.random() < 0.5,
            "int": lambda: self.integer(name),
            "SymInt": lambda: self.integer(name),
            "List[int]": lambda: self.integers(name),
            "List[SymInt]": lambda: self.integers(name),
            "List[number]": lambda: [data.choice(NUMBERS) for _ in range(2)],
            "List[float]": lambda: [0.5, 1.0],
            "List[bool]": lambda: [True, False],
            "ScalarType": lambda: data.choice(DTYPES),
            "Device": lambda: data.choice(("cpu", There())) if self.has_tensor else There(),
        }
        if kind in plain:
            return plain[kind]()
        if kind == "str" and name in WORDS:
            return data.choice(WORDS[name])
        if kind in ("MemoryFormat", "Layout", "Generator") and str(argument.real_type).startswith("Optional["):
            return None
        raise NotDrawn(kind)

    def tensor(self, argument: Any) -> Given:
        data = self.data
        dtype = self.dtype if data.random() < 0.6 else data.choice(DTYPES)
        if argument.name.startswith(("index", "indices")):
            dtype = torch.int64
        if argument.name in ("mask", "condition") and data.random() < 0.8:
            dtype = torch.bool
        kind = data.choice(KINDS) if data.random() < 0.6 else "plain"
        first = self.op._schema.arguments[0] is argument or self.op._schema.arguments[0].name == argument.name
        kind = "plain" if first and kind in ("host scalar", "same") else kind
        if self.is_factory and not argument.is_out:
            kind = "host scalar"
        if argument.is_out and kind == "host scalar":
            kind = "scalar"
        return Given(dtype, kind, data.randrange(1 << 30), argument.is_out)

    @property
    def is_factory(self) -> bool:
        """Whether the place of the result is told by ``device`` alone, and tensors are numbers."""
        return self.op._schema.name in ("aten::linspace", "aten::logspace")

    def integer(self, name: str) -> int:
        choices = (-1, 0, 1, 0, 1, 5) if name.startswith("dim") else (0, 1, 2, 3, -1)
        return self.data.choice(choices)

    def integers(self, name: str) -> list[int]:
        if "dim" in name:
            return self.data.choice(([0], [1], [0, 1], [-1], []))
        return self.data.choice(([2, 3], [6], [3, 2], [1], [2, 1], [2], [1, 1]))


def _function(op: Any) -> Callable[..., Any] | None:
    """What a program calls for an operator: the tensor's method, or the function of ``torch``."""
    base = op._schema.name.removeprefix("aten::")
    has_out = any(a.is_out for a in op._schema.arguments)
    takes_self = bool(op._schema.arguments) and op._schema.arguments[0].name == "self"
    if takes_self and not has_out and hasattr(torch.Tensor, base):
        return getattr(torch.Tensor, base)
    return getattr(torch, base, None)


def drawn_cases(per_operator: int, seed: int, only: str = "") -> Iterator[Case]:
    """Calls of every operator with drawn arguments, the same for the same seed."""
    for op in operators():
        name = op.name().removeprefix("aten::")
        function = _function(op)
        if function is None or (only and only not in name):
            continue
        for number in range(per_operator):
            data = random.Random(f"{seed} {name} {number}")
            try:
                case = _drawn(op, name, function, Drawer(op, data))
            except NotDrawn:
                break
            yield case


_NO_VALUES: Final = ("empty", "dropout", "normal", "rand")


def _drawn(op: Any, name: str, function: Callable[..., Any], drawer: Drawer) -> Case:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    outs: list[Any] = []
    arguments = list(op._schema.arguments)
    skipped = False
    for argument in arguments:
        if argument.is_out:
            outs.append(drawer.argument(argument))
            continue
        wanted = argument.name == "device" and not drawer.has_tensor
        if argument.has_default_value() and not wanted and drawer.data.random() < 0.5:
            skipped = True
            continue
        value = drawer.argument(argument)
        if argument.name == "device" and (wanted or drawer.is_factory):
            value = There()
        if value is None and argument.has_default_value():
            skipped = True
            continue
        if argument.kwarg_only or skipped:
            kwargs["input" if argument.name == "self" else argument.name] = value
        else:
            args.append(value)
    if drawer.is_factory:
        kwargs["device"] = There()
    if outs:
        kwargs["out"] = outs[0] if len(outs) == 1 else tuple(outs)
    text = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])

    def call(maker: Maker) -> Any:
        return function(*[maker.of(value) for value in args], **{key: maker.of(v) for key, v in kwargs.items()})

    random_values = torch.Tag.nondeterministic_seeded in op.tags or any(word in name for word in _NO_VALUES)
    group = "out=" if outs else "in place" if op._schema.is_mutable else "functional"
    return Case(group, name, f"{name}({text})", call, not random_values)


# -- PyTorch's own error inputs --------------------------------------------------------------------------------------
def error_cases() -> Iterator[Case]:
    """The inputs that PyTorch's operator database says are refused."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.error_inputs_func is None:
            continue
        try:
            count = len(list(op.error_inputs("cpu")))
        except Exception:
            continue
        for number in range(count):
            yield Case("error inputs", op.full_name, f"{op.full_name} error input {number}", _error_call(op, number))


def _error_call(op: Any, number: int) -> Callable[[Maker], Any]:
    def call(maker: Maker) -> Any:
        sample = list(op.error_inputs(maker.device))[number].sample_input
        return op(sample.input, *sample.args, **sample.kwargs)

    return call


@dataclass
class Difference:
    """A case whose outcome is another than the CPU's."""

    how: str
    case: Case
    cpu: Outcome
    port: Outcome

    def __str__(self) -> str:
        return f"{self.how}: {self.case.text}\n      cpu  {_short(self.cpu)}\n      port {_short(self.port)}"


# -- what remains ------------------------------------------------------------------------------------------------------
def _shapes(outcome: Outcome) -> list[Any]:
    return [getattr(value, "shape", None) for value in outcome.values or ()]


def _out_is_a_view(difference: Difference) -> bool:
    shown = difference.case.text.partition("out=")[2]
    return any(kind in shown for kind in ("transposed", "shifted", "detached", "expanded", "same", "row"))


REASONS: Final[Sequence[tuple[str, Callable[[Difference], bool]]]] = (
    (
        "the CPU gives the memory behind out= another shape; a view's base cannot be reached here",
        lambda d: d.how in ("refused in words", "refused") and _out_is_a_view(d),
    ),
    (
        "whether a value is refused is known when it is computed",
        lambda d: (
            d.how == "refused late"
            and (d.case.name == "segment_reduce" or any(words in d.cpu.error for words in _OF_VALUES))
        ),
    ),
    (
        "a device's memory cannot be pinned, nor need it be; there is no allocator for the CPU's either",
        lambda d: d.how == "accepted" and "pin_memory=True" in d.case.text,
    ),
    (
        "the CPU overwrites what it still reads, or writes elements that share memory one after the other",
        lambda d: (
            d.how == "another value"
            and d.case.name in ("max.unary_out", "min.unary_out", "cummax.out", "cummin.out")
            and _out_is_a_view(d)
        ),
    ),
    (
        "not mended: the CPU writes complex numbers that are real, and numbers of no dimension, to any out=",
        lambda d: (
            d.case.name.startswith(("linspace.", "logspace.", "range."))
            and d.case.name.endswith("out")
            and (d.how == "refused" or (d.how == "another value" and _shapes(d.port) != _shapes(d.cpu)))
        ),
    ),
    (
        "not mended: a shift by bools, which PyTorch's decomposition refuses",
        lambda d: d.how == "refused" and "shift" in d.case.name and "Expected shift value" in d.port.error,
    ),
    (
        "not mended: normal_ of integers on the CPU takes them with out= only, and the least of no elements",
        lambda d: (
            d.how == "refused" and d.case.name.endswith("out") and d.case.name.startswith(("normal.", "min.unary"))
        ),
    ),
    (
        "a 0-dim CPU tensor is a number in ATen's operators, and not in composites that call view() on it",
        lambda d: d.port.kind == "DeviceMismatch" and "host scalar" in d.case.text,
    ),
    (
        "every in-place operator refuses tensors that overlap with themselves; the CPU's triangles, threshold_ do not",
        lambda d: d.case.name in ("tril_", "triu_", "threshold_") and "expanded" in d.case.text,
    ),
    (
        "integers that overflow before they are cast to the dtype of out= are cast first",
        lambda d: d.case.name == "mul.Scalar_out" and d.how == "another value",
    ),
    (
        "the composite calls view() on what it has resized, which has other strides here",
        lambda d: d.case.name == "kron.out" and d.how == "refused",
    ),
    (
        "not mended: histc of dtypes that its CPU kernel has no form for, and multinomial of too many categories",
        lambda d: d.how == "accepted" and d.case.name.partition(".")[0] in ("histc", "multinomial"),
    ),
    (
        "not mended: composites of a 0-dim CPU tensor, and logspace of complex CPU tensors with out=",
        lambda d: d.how == "refused" and "host scalar" in d.case.text,
    ),
    (
        "both refuse at the call; shapes are looked at before values, and by PyTorch's rule before its kernel",
        lambda d: d.how == "another error" and d.port.kind != "AssertionError",
    ),
)
_OF_VALUES: Final = (
    "ZeroDivisionError", "out of bounds", "out of range", "segment_reduce", "lengths", "setStorage",
    "The shape of the mask", "number of ones in mask",
)  # fmt: skip


_CANNOT_RAISE: Final = ("ZeroDivisionError", "out of bounds", "out of range", "number of ones in mask")
OF_XLA: Final[Sequence[tuple[str, Callable[[Difference], bool]]]] = (
    (
        "XLA cannot raise from inside a computation (docs/xla.md)",
        lambda d: (
            d.how == "accepted"
            and any(words in d.cpu.error for words in _CANNOT_RAISE)
            and "setStorage" not in d.cpu.error
        ),
    ),
    (
        "XLA has no complex numbers of half precision, and says so when it is asked for the value",
        lambda d: d.how == "fails when read" and "torch.complex32" in f"{d.port.error} {_short(d.cpu)} {d.case.text}",
    ),
    (
        "XLA has no complex numbers of half precision: a float16 beside a complex number becomes one",
        lambda d: d.how == "fails when read" and "float16" in d.case.text and "j" in d.case.text,
    ),
    (
        "where equal values came from is the engine's choice",
        lambda d: d.how == "another value" and d.case.name.partition(".")[0] in ("kthvalue", "topk", "sort", "mode"),
    ),
    (
        "complex powers of 0 are not a number on the CPU for some exponents, whatever they are",
        lambda d: d.how == "another value" and d.case.name.startswith("pow") and "complex" in d.case.text,
    ),
)


def reason(difference: Difference, backend: str = "") -> str | None:
    """Why a difference remains, or ``None`` for one that should not be."""
    reasons = (*REASONS, *OF_XLA) if backend == "xla" else REASONS
    return next((why for why, holds in reasons if holds(difference)), None)


# -- the sweep -------------------------------------------------------------------------------------------------------
def _short(outcome: Outcome) -> str:
    if outcome.values is None:
        return f"at the {outcome.when}: {outcome.error}"
    first = outcome.values[0]
    if isinstance(first, torch.Tensor) and first.layout is not torch.strided:
        return f"a tensor of layout {first.layout}"
    return f"{' '.join(repr(first).split())[:160]} {getattr(first, 'dtype', '')}"


def sweep(cases: Iterator[Case], device: str = "port") -> tuple[collections.Counter[tuple[str, str]], list[Difference]]:
    """How many cases of each group came out how, and the differences."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    differences: list[Difference] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            cpu, port = run(case, "cpu"), run(case, device)
            how = judge(case, cpu, port)
            counts[case.group, how] += 1
            if how != "same":
                differences.append(Difference(how, case, cpu, port))
    return counts, differences


def main() -> int:
    """The sweep as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-operator", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="operators with this in their names")
    parser.add_argument("--show", type=int, default=2, help="examples per operator and difference")
    parser.add_argument("--eager", action="store_true", help="the device's eager mode")
    given = parser.parse_args()
    import torchport

    torchport.use("reference")
    drawn = drawn_cases(given.per_operator, given.seed, given.only)
    cases = [*drawn, *([] if given.only else error_cases())]
    with torchport.mode("eager" if given.eager else "lazy"):
        counts, differences = sweep(iter(cases))
    shown: collections.Counter[tuple[str, str]] = collections.Counter()
    for difference in sorted(differences, key=lambda d: (d.how, d.case.name)):
        shown[difference.how, difference.case.name] += 1
        if shown[difference.how, difference.case.name] <= given.show:
            print(difference)
    for (group, how), count in sorted(counts.items()):
        print(f"{group:14} {how:18} {count}")
    print(f"{len(cases)} cases, {len(differences)} differences ({100 * len(differences) / max(1, len(cases)):.2f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
