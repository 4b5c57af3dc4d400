"""Numerical comparison, profiles of lowered programs, and PyTorch's TorchScript demonstration beside ``add_sub``."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import torchport
from torchport import aot, runtime
from torchport.backend.interface import ArrayData, FreeableBuffer, InitContext, Processed
from torchport.backend.serialize import decode, encode
from torchport.backends.add_sub import AddSubBackend
from torchport.backends.reference import ReferenceBackend
from torchport.backends.reference.program import make_run
from torchport.core.errors import CompileError, DelegateError, ErrorCode
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.debug.numeric import compare

aten = torch.ops.aten


# -- numbers -------------------------------------------------------------------------------------------------------
class Rounding(ReferenceBackend):
    """``sin`` is a little off."""

    name = "aot_rounding"

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return Processed(encode(graph))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        module = decode(processed.data)
        for node in list(module.graph.find_nodes(op="call_function", target=aten.sin.default)):
            with module.graph.inserting_after(node):
                wrong = module.graph.call_function(aten.add.Tensor, (node, 0.01))
            node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)
        return make_run(module, {})


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(self.layer(x)) * 3.0)


def test_the_first_operator_beyond_the_bound_is_found() -> None:
    torchport.register(Rounding)
    x = torch.rand(3, 4)
    lowered = aot.lower(Waves(), (x,), backend="aot_rounding")
    found = compare(lowered, x, max_error=1e-3)
    assert found.first is not None
    assert found.first.op == "aten.sin.default"
    assert found.first.max_abs == pytest.approx(0.01, rel=1e-3)
    assert found.first.mse == pytest.approx(1e-4, rel=1e-2)
    assert 20 < found.first.snr < 50
    assert "test_aot_debug.py" in found.first.source
    assert len({gap.debug_handle for gap in found.gaps}) == len(found.gaps)
    by_op = {gap.op: gap for gap in found.gaps}
    linear = next(gap for op, gap in by_op.items() if "linear" in op or "addmm" in op)
    assert (linear.max_abs, linear.snr, linear.module) == (0.0, math.inf, "layer")
    assert any(line.startswith("→") and "aten.sin" in line for line in found.table().splitlines())
    assert compare(lowered, x, max_error=10.0).first is None
    assert compare(aot.lower(Waves(), (x,), backend="reference"), x, max_error=0.0).first is None


# -- profiles --------------------------------------------------------------------------------------------------------
def test_a_profile_sums_per_module_and_line(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = x + y
            return total - 1.0

    x = torch.rand(2)
    aot.lower(Sums(), (x, x), backend="add_sub").save(tmp_path / "s.pt2")
    method = runtime.load(tmp_path / "s.pt2", profile=True).load_method()
    method(x, x)
    profile = method.profile()
    ops = [event for event in profile.events if event.kind == "op"]
    assert [event.name for event in ops] == ["aten::add", "prim::Constant", "aten::sub"]
    assert all(event.end >= event.start and event.handles and "test_aot_debug.py" in event.source for event in ops)
    assert sum(event.nbytes for event in profile.events if event.kind == "memory") == 16
    assert len(profile.by_line()) == 2
    names = [event["name"] for event in json.loads(profile.chrome_trace())["traceEvents"]]
    assert names.index("program") < names.index("method forward") < names.index("aten::add")


# -- PyTorch's demonstration -------------------------------------------------------------------------------------------
class Adding(nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x + h


class Subtracting(nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x - h


class Multiplying(nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x * h


@pytest.fixture(scope="module")
def demo() -> Any:
    """Lowers a module with the TorchScript demonstration backend, whose libraries come with PyTorch."""
    folder = Path(torch.__file__).parent / "lib"
    libraries = [folder / name for name in ("libjitbackend_test.so", "libbackend_with_compiler.so")]
    absent = [str(path) for path in libraries if not path.exists()]
    if absent:
        pytest.skip(f"this PyTorch comes without {', '.join(absent)}")
    for path in libraries:
        torch.ops.load_library(str(path))

    def lower(module: nn.Module) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            scripted = torch.jit.script(module)
            return torch._C._jit_to_backend("backend_with_compiler_demo", scripted, {"forward": {"": ""}})

    return lower


@pytest.mark.parametrize("module", [Adding(), Subtracting()], ids=["add", "sub"])
def test_the_demonstration_and_add_sub_give_the_same_values(demo: Any, module: nn.Module) -> None:
    x, h = torch.tensor([1.5]), torch.tensor([0.25])
    theirs = demo(module)
    (expected,) = [theirs.forward(x, h)]
    ours = aot.lower(module, (x, h), backend="add_sub")
    assert not ours.left["forward"]
    torch.testing.assert_close(ours(x, h), expected)
    (blob,) = ours._blobs.values()
    op = "add" if isinstance(module, Adding) else "sub"
    assert blob.decode() == f"aten::{op}(%0,%1)<debug_handle>1|%2"


def test_an_unsupported_operator_fails_at_lowering_with_the_models_source(demo: Any) -> None:
    with pytest.raises(RuntimeError) as theirs:
        demo(Multiplying())
    assert "is not supported" in str(theirs.value)
    assert "x * h" in str(theirs.value)
    x = torch.tensor([1.0])
    with pytest.raises(RuntimeError, match="adds and subtracts, nothing else") as ours:
        aot.lower(Multiplying(), (x, x), partitioners=[aot.WholeProgram("add_sub")])
    text = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(text, 1) if "return x * h" in line)
    assert f"{__file__}:{number} in forward" in str(ours.value)
    assert "aten.mul.Tensor" in str(ours.value)


@pytest.mark.parametrize(
    ("x", "h", "theirs_say", "ours_say", "code"),
    [
        (torch.ones(1), torch.ones(2), "sizes", "should be float32", ErrorCode.INVALID_ARGUMENT),
        (torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), "Only float tensors", "should be float32",
         ErrorCode.INVALID_TYPE),
    ],
    ids=["sizes", "dtype"],
)  # fmt: skip
def test_wrong_inputs_fail_on_both(demo: Any, x: Any, h: Any, theirs_say: str, ours_say: str, code: int) -> None:
    with pytest.raises(RuntimeError, match=theirs_say):
        demo(Adding()).forward(x, h)
    one = torch.ones(1)
    lowered = aot.lower(Adding(), (one, one), backend="add_sub")
    with pytest.raises(RuntimeError, match=ours_say) as caught:
        lowered(x, h)
    assert caught.value.code == code  # type: ignore[attr-defined]


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Adding()

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.inner(x, h)


class Refusing(AddSubBackend):
    """Gets to its own checks, which the runtime's come before."""

    name = "aot_refusing"

    def _run(self, token: Any, values: Any, context: Any) -> Any:
        return super()._run(token, [values[0], values[1][:1], *values[2:]], context)


def test_an_error_while_running_says_at_least_what_the_demonstration_does(demo: Any, tmp_path: Path) -> None:
    """There with debug information saved for the lite interpreter: modules with classes, operator, all calls' text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        from torch.jit.mobile import _load_for_lite_interpreter

        saved = demo(Holding())._save_to_buffer_for_lite_interpreter(_save_mobile_debug_info=True)
        mobile = _load_for_lite_interpreter(io.BytesIO(saved))
    with pytest.raises(RuntimeError, match=r"x\.sizes\(\) == h\.sizes\(\)") as theirs:
        mobile.forward(torch.ones(3), torch.ones(1))
    said = str(theirs.value)
    assert "Module hierarchy:top(Holding)" in said
    torchport.register(Refusing)
    x = torch.ones(3)
    aot.lower(Holding(), (x, x), backend="aot_refusing").save(tmp_path / "a.pt2")
    with pytest.raises(DelegateError, match=r"different sizes: \[3\] and \[1\]") as ours:
        runtime.load(tmp_path / "a.pt2").load_method()(x, x)
    error, text = ours.value, str(ours.value)
    assert (error.code, error.debug_handles) == (ErrorCode.INVALID_ARGUMENT, (1,))
    for both in ("return self.inner(x, h)", "return x + h", "inner", "Adding", __file__):
        assert both in said
        assert both in text
    assert "aten::add" in said
    assert (error.op, error.module, error.hierarchy) == ("aten.add.Tensor", "inner", "Holding > inner: Adding")
    for number in (n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "return x + h" in line):
        if f"line {number}, in forward" in said:
            assert error.source == f"{__file__}:{number} in forward"
            break
    else:
        raise AssertionError("the demonstration names no line")


def test_an_unavailable_backend_is_lowered_for_and_fails_to_load(tmp_path: Path) -> None:
    """As the demonstration does: there it warns when lowering, saves, and raises when it runs and when it is loaded."""

    class Sometimes(AddSubBackend):
        name = "aot_sometimes"
        here = True

        def is_available(self) -> bool:
            return self.here

    backend = Sometimes()
    torchport.register(backend)
    x = torch.ones(3)
    lowered = aot.lower(Adding(), (x, x), backend=backend)
    backend.here = False
    lowered.save(tmp_path / "a.pt2")
    for program in (lowered.program, runtime.load(tmp_path / "a.pt2")):
        with pytest.raises(DelegateError, match="cannot run here") as caught:
            program.load_method()
        assert caught.value.code == ErrorCode.NOT_FOUND
    backend.here = True
    torch.testing.assert_close(runtime.load(tmp_path / "a.pt2").load_method()(x, x)[0], x + x)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x|%0",
        "aten::mul(%0,%1)<debug_handle>1|%2",
        "aten::add(%0,%9)<debug_handle>1|%2",
        "aten::add(%0,%1)<debug_handle>1|%7",
        "prim::Constant#x<debug_handle>1|%2",
    ],
)
def test_add_sub_refuses_other_text(text: str) -> None:
    from torchport.backend.interface import BackendDevice, ExecutionContext

    backend, device = AddSubBackend(), BackendDevice("cpu")
    spec = TensorSpec((2,), torch.float32, (1,))
    values = [ArrayData(device, spec, torch.ones(2).numpy())] * 2
    with pytest.raises((CompileError, DelegateError)):
        handle = backend.init(FreeableBuffer(text.encode()), CompileSpecs(), InitContext(device, (spec,) * 2, (spec,)))
        backend.execute(handle, values, ExecutionContext(device, (spec,)))
