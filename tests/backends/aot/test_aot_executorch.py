"""ExecuTorch as a backend: a delegate whose bytes are a ``.pte``, the lazy device, other bytes, errors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchport
from torchport import aot, runtime
from torchport.backend.interface import BackendDevice, FreeableBuffer, InitContext
from torchport.backends.executorch import ExecuTorchBackend
from torchport.backends.executorch.portable import DTYPES, OF_EACH
from torchport.core.errors import CompileError, ConfigError, DelegateError, ErrorCode
from torchport.core.specs import CompileSpecs

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not ExecuTorchBackend().is_available(), reason=ExecuTorchBackend().unavailable_reason())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(torch.relu(self.conv(x)).mean((2, 3))))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, torch.Tensor, Path]:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    lowered = aot.lower(net, (x,), backend="executorch")
    assert not lowered.left["forward"], lowered.report()
    torch.testing.assert_close(lowered(x), net(x), rtol=1e-4, atol=1e-5)
    path = tmp_path_factory.mktemp("executorch") / "net.pt2"
    lowered.save(path)
    return net, x, path


@pytest.mark.slow
def test_the_pte_is_taken_out_and_runs_on_executorch_alone(saved: tuple[Net, torch.Tensor, Path]) -> None:
    """Its inputs are the delegate's, its weights are inside: what a phone needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is experimental
        from executorch.runtime import Runtime

    net, x, path = saved
    pte = runtime.load(path).delegate_data("forward", 0)
    assert pte[4:8] == b"ET12"
    method = Runtime.get().load_program(pte).load_method("forward")
    assert method is not None
    (result,) = method.execute([x])
    torch.testing.assert_close(result, net(x), rtol=1e-4, atol=1e-5)


def test_the_program_runs_and_can_run_again(saved: tuple[Net, torch.Tensor, Path]) -> None:
    net, x, path = saved
    with runtime.load(path).load_method() as method:
        for scale in (1.0, 2.0, -1.0):
            torch.testing.assert_close(method(x * scale)[0], net(x * scale), rtol=1e-4, atol=1e-5)
        (array,) = method(x.numpy())
        torch.testing.assert_close(torch.from_numpy(array), net(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_file_holds_each_weight_once(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(2, 256)
    weights = sum(one.nbytes for one in net.parameters())
    lowered = aot.lower(net, (x,), backend="executorch")
    assert lowered.save(tmp_path / "once.pt2").total < 1.1 * weights
    assert lowered.save(tmp_path / "twice.pt2", exported_model=True).total > 2 * weights
    for name in ("once", "twice"):
        (found,) = runtime.load(tmp_path / f"{name}.pt2").load_method()(x)
        torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.export.load(tmp_path / "twice.pt2").module()(x), net(x))
    with pytest.raises(Exception, match="model"):
        torch.export.load(tmp_path / "once.pt2")


def test_loading_does_not_import_the_exporter(saved: tuple[Net, torch.Tensor, Path]) -> None:
    code = f"""
import sys, torch
from torchport import runtime
x = torch.ones(2, 3, 8, 8)
print(runtime.load({str(saved[2])!r}).load_method()(x)[0].shape[0], "executorch.exir" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_the_lazy_device() -> None:
    device = torchport.device("executorch")
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    found = torch.relu(x.to(device) @ w.to(device)).cpu()
    torch.testing.assert_close(found, torch.relu(x @ w), rtol=1e-4, atol=1e-5)


def test_what_xnnpack_has_not_is_left() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(torch.relu(x), 0) + 1.0

    x = torch.randn(80, 80)
    lowered = aot.lower(Model(), (x,), backend="executorch")
    (left,) = lowered.left["forward"]
    assert (left.op, "XNNPACK does not have it" in left.reason) == ("aten.cumsum.default", True)
    torch.testing.assert_close(lowered(x), Model()(x))
    whole = aot.lower(Model(), (x.double(),), backend="executorch")
    assert not whole.program.meta().delegates, "float64 is not for it"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x.cumsum(0), x.cos()), lambda x: x.var(1), lambda x: (x.flip(0), x.argmax(1)),
        lambda x: x.log_softmax(1).gather(1, torch.zeros(3, 2, dtype=torch.long).to(x.device)),
        lambda x: torch.linalg.norm(x, dim=1), lambda x: (x[:0] + 1, x.sum()), lambda x: x[:, :0].sin(),
        lambda x: nn.functional.gelu(x, approximate="tanh"), lambda x: x.round(decimals=1),
    ],
)  # fmt: skip
def test_small_tensors_are_the_portable_kernels(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3, 4)
    with torchport.config.override(fallback="error"):
        found = function(x.to(torchport.device("executorch")))
        found = tuple(one.cpu() for one in found) if isinstance(found, tuple) else found.cpu()
    torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-5)


def test_other_bytes_and_options() -> None:
    backend = torchport.get_backend("executorch")
    with pytest.raises(CompileError, match="cannot load these bytes"):
        backend.init(FreeableBuffer(b"x" * 100), CompileSpecs(), InitContext(BackendDevice("cpu")))
    with pytest.raises(ConfigError, match="no compile specs"):
        aot.lower(nn.ReLU(), (torch.ones(2),), backend="executorch", compile_specs={"level": "3"})


def test_a_program_whose_pte_is_another_engines_is_incompatible() -> None:
    class Foreign(type(torchport.get_backend("executorch"))):  # type: ignore[misc]
        name = "executorch_foreign"

        def preprocess(self, graph: torch.fx.GraphModule, specs: CompileSpecs) -> torchport.Processed:
            return torchport.Processed(b"ET99 of tomorrow" * 8)

    with pytest.raises(DelegateError, match="init failed: ExecuTorch cannot load these bytes") as caught:
        aot.lower(nn.ReLU(), (torch.ones(2),), backend=Foreign())(torch.ones(2))
    assert caught.value.code == ErrorCode.DELEGATE_INVALID_COMPATIBILITY == 0x30


def test_views_of_values_with_other_strides() -> None:
    """Attention is left to PyTorch, which gives it strides under which the view that follows is one."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = nn.functional.scaled_dot_product_attention(x, x, x)
            return torch.relu(heads.transpose(1, 2).reshape(2, 96, 128))

    x = torch.randn(2, 2, 96, 64)
    lowered = aot.lower(Attention(), (x,), backend="executorch")
    assert lowered.left["forward"]
    assert lowered.program.meta().delegates
    torch.testing.assert_close(lowered(x), Attention()(x), rtol=1e-4, atol=1e-5)


def test_what_executorch_gets_wrong_stays_with_us() -> None:
    device = torchport.device("executorch")
    empty = torch.empty(0, 5).t()  # its strides are not those ExecuTorch asks of a tensor, and it ends the process
    assert (empty.to(device) + 1).cpu().shape == (5, 0)
    scalar = torch.tensor(2.0)
    assert scalar.to(device).permute(()).cpu() == 2.0
    x = torch.linspace(-3, 3, 20)
    ours = nn.functional.gelu(x.to(device), approximate="tanh").cpu()
    torch.testing.assert_close(ours, nn.functional.gelu(x, approximate="tanh"))
    there = torch.relu(x.to(device))
    copied = there.clone()
    with pytest.warns(RuntimeWarning, match="portable kernels run it"):
        torchport.sync()
    torch.testing.assert_close(copied.cpu(), torch.relu(x))


def test_batch_norm_in_evaluation_is_taken() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    lowered = aot.lower(net, (x,), backend="executorch")
    assert not lowered.left["forward"], lowered.report()
    torch.testing.assert_close(lowered(x), net(x), rtol=1e-4, atol=1e-5)


class OfEach(nn.Module):
    """Many operators on each element, called with what their schemas ask for; which of them eager refuses is left."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        mask = a if a.dtype is torch.bool else a > 2
        self.calls: list[tuple[Any, list[Any], dict[str, Any]]] = []
        for op in sorted(OF_EACH | {aten.remainder.Scalar, aten.remainder.Tensor}, key=str):
            kwargs = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
            for number in (2, -3, 2.5):
                tensors = iter(
                    (mask, a, b) if op is aten.where.self else (a, mask) if "masked" in str(op) else (a, b, b)
                )
                args: list[Any] = []
                for said in (one for one in op._schema.arguments if not one.kwarg_only and not one.has_default_value()):
                    args.append(next(tensors) if "Tensor" in str(said.type) else number)
                has_tensor = any(isinstance(arg, torch.Tensor) for arg in args)
                with contextlib.suppress(RuntimeError, TypeError):
                    if has_tensor and isinstance(op(*args, **kwargs), torch.Tensor):
                        places = [0 if arg is a else 1 if arg is b else 2 if arg is mask else arg for arg in args]
                        kinds = [isinstance(arg, torch.Tensor) for arg in args]
                        self.calls.append((op, list(zip(kinds, places, strict=True)), kwargs))
                if not any(str(one.type) == "number" for one in op._schema.arguments):
                    break

    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        return [
            op(*(given[place] if is_tensor else place for is_tensor, place in args), **kwargs)
            for op, args, kwargs in self.calls
        ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_portable_kernels_agree_with_pytorch(dtype: torch.dtype) -> None:
    """Of both signs: a remainder of integers had the sign of the dividend."""
    least = 0 if dtype in (torch.uint8, torch.bool) else -6
    a = torch.arange(least, least + 12).to(dtype)
    b = a.flip(0).roll(3)
    b = b if dtype is torch.bool else torch.where(b == 0, torch.full_like(b, 2), b)
    given = (a, b, a if dtype is torch.bool else a > 2)
    module = OfEach(a, b)
    assert len(module.calls) > (20 if dtype is torch.bool else 40)
    lowered = aot.lower(module, given, backend="executorch")
    assert lowered.program.meta().delegates, lowered.report()
    for (op, args, _), ours, theirs in zip(module.calls, lowered(*given), module(*given), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, op=op, args=args: f"{op}{args}: {text}"
        )


def test_what_portable_kernels_compute_otherwise_stays_with_us() -> None:
    x, image = torch.rand(4, 5), torch.rand(3, 8, 8)
    places = torch.randint(0, 4, (3, 5)).int()
    bytes_ = torch.arange(5, dtype=torch.uint8)

    class Program(nn.Module):
        def forward(self, x: torch.Tensor, places: torch.Tensor, image: torch.Tensor, few: torch.Tensor) -> Any:
            return x.gather(0, places), torch.nn.functional.avg_pool2d(image, 2), few.fmod(-3)

    lowered = aot.lower(Program(), (x, places, image, bytes_), backend="executorch")
    said = " ".join(one.reason for one in lowered.left["forward"])
    for reason in ("places of 64 bits", "without a batch", "a negative number"):
        assert reason in said, lowered.report()
    for ours, theirs in zip(lowered(x, places, image, bytes_), Program()(x, places, image, bytes_), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_negative_index_is_one_from_the_end() -> None:
    x, places = torch.rand(5, 5), torch.randint(-5, 0, (5, 5))
    with torchport.config.override(tiers="off"):
        device = torchport.device("executorch")
        ours = torch.take_along_dim(x.to(device), places.to(device), 1)
        assert torch.equal(ours.cpu(), torch.take_along_dim(x, places, 1))


def test_a_pytorch_whose_tensors_it_reads_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert "2.13 or newer, not of 2.11.0" in ExecuTorchBackend().unavailable_reason()
    assert not ExecuTorchBackend().is_available()
