"""``p.data = p.data.to("port")``, and what else moves the inside of a tensor that others hold."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchport


@pytest.fixture(autouse=True)
def _reference() -> None:
    torchport.use("reference")


def test_data_of_a_parameter_comes_to_the_device_and_leaves_it() -> None:
    net = nn.Linear(3, 2)
    held, reference, bias = net.bias, weakref.ref(net.bias), net.bias.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for parameter in net.parameters():
        parameter.data = parameter.data.to("port")
    net(torch.ones(1, 3).to("port")).sum().backward()
    optimizer.step()
    assert net.bias is held is reference()
    assert isinstance(held, nn.Parameter)
    torch.testing.assert_close(held.detach().cpu(), bias - 1)
    for parameter in net.parameters():
        parameter.data = parameter.data.cpu()
    assert held.device.type == "cpu"
    assert held.grad is not None
    assert held.grad.device.type == "cpu"
    net(torch.ones(1, 3)).sum().backward()
    assert held.grad.tolist() == [2.0, 2.0]


def test_data_may_have_another_shape_and_dtype() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.zeros(2, 2, dtype=torch.half, device="port")
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == ((2, 2), torch.half, True)
    plain = torch.ones(3)
    plain.data = plain.data.to("port")
    assert plain.tolist() == [1.0, 1.0, 1.0]
    assert not plain.requires_grad


def test_gradients_and_hooks_come_along() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), list[torch.Tensor]()
    parameter.register_hook(seen.append)
    (parameter * 3).sum().backward()
    grad = parameter.grad
    assert grad is not None
    parameter.data = parameter.data.to("port")
    assert parameter.grad is grad
    grad.data = grad.data.to("port")  # as programs do next
    assert grad.device.type == "port"
    assert grad.tolist() == [3.0, 3.0]
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [5.0, 5.0]
    assert len(seen) == 2


def test_data_of_a_recorded_result_is_refused() -> None:
    result = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"MulBackward0.*x = x\.to\('port"):
        result.data = result.data.to("port")


def test_data_within_a_device_is_as_before() -> None:
    for device in ("cpu", "port"):
        parameter = nn.Parameter(torch.ones(2, device=device))
        parameter.data = torch.zeros(3, device=device)
        assert parameter.tolist() == [0.0, 0.0, 0.0]
        with pytest.raises(TypeError):
            parameter.data = 3  # type: ignore[assignment]


def test_data_in_a_compiled_function() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.data * 2

    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert doubled(torch.ones(2, device="port")).tolist() == [2.0, 2.0]


def test_function_modes_hear_of_data_as_before() -> None:
    heard = list[object]()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            heard.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        _ = x.data
    assert heard == [torch.Tensor.data.__get__]


def _weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(3, 2))


def _exported() -> nn.Module:
    return torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (torch.ones(1, 3),)).module()


@pytest.mark.parametrize(
    "make",
    [
        _weight_norm,
        _exported,
        lambda: torch.fx.symbolic_trace(nn.Linear(3, 2)),
        pytest.param(
            lambda: torch.jit.script(nn.Linear(3, 2)),
            marks=pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
        ),
    ],
    ids=["weight_norm", "exported", "traced", "scripted"],
)
def test_modules_of_every_kind_move(make: Callable[[], nn.Module]) -> None:
    net, x = make(), torch.ones(1, 3)
    expected = net(x)
    torch.testing.assert_close(net.to("port")(x.to("port")).cpu(), expected)
    torch.testing.assert_close(net.to("cpu")(x), expected)


def test_a_module_moves_while_a_graph_holds_its_parameters() -> None:
    net = nn.Linear(3, 2)
    before = net(torch.ones(1, 3))
    net.to("port")
    after = net(torch.ones(1, 3, device="port"))
    torch.testing.assert_close(after.cpu(), before)
    after.sum().backward()
    assert net.bias.grad is not None
    assert net.bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_loading_safetensors_may_be_what_first_uses_the_device(tmp_path: Path) -> None:
    """The library's list of devices is closed; that it is told of ours waited for the first use of the device."""
    pytest.importorskip("safetensors.torch").save_file({"w": torch.arange(3.0)}, tmp_path / "w")
    program = f"""
import torch, safetensors.torch
found = safetensors.torch.load_file({str(tmp_path / "w")!r}, device="port")["w"]
with safetensors.safe_open({str(tmp_path / "w")!r}, "pt", device="port") as file:
    assert file.get_tensor("w").device == found.device == torch.device("port", 0)
print(found.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[0.0, 1.0, 2.0]\n", 0), done.stderr
