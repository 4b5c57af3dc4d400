"""``Capabilities.dtypes`` and ``no_empty``: an engine is given what it says it has, and programs run all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from fakes import Fake
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import torchport
from torchport import BackendData, BackendDevice, Capabilities, ExecutionContext, Processed, Support, TensorData

FEW = frozenset({torch.float32, torch.int32, torch.bool})


class Strict(Fake):
    """Ends the test when it is given what it does not have, whichever method is asked."""

    name: ClassVar[str] = "strict"
    given: ClassVar[list[str]] = []

    def _look(self, where: str, *values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and (value.dtype not in FEW or value.numel() == 0):
                self.given.append(f"{where}: {value.dtype}{list(value.shape)}")

    def supports(self, node: fx.Node) -> Support:
        self._look(f"supports {node.target}", node.meta["val"], *(one.meta["val"] for one in node.all_input_nodes))
        return super().supports(node)

    def to_device(self, tensor: Tensor, device: BackendDevice) -> BackendData:
        self._look("to_device", tensor)
        return super().to_device(tensor, device)

    def from_device(self, data: BackendData) -> Tensor:
        assert isinstance(data, TensorData)
        self._look("from_device", data.tensor)
        return super().from_device(data)

    def borrow(self, tensor: Tensor, spec: Any, device: BackendDevice) -> BackendData:
        self._look("borrow", tensor)
        return TensorData(device, spec, tensor)

    def preprocess(self, graph: fx.GraphModule, specs: Any) -> Processed:
        self._look("preprocess", *(node.meta["val"] for node in graph.graph.nodes if node.op != "output"))
        return super().preprocess(graph, specs)

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        self._look("execute", *(value.handle for value in args))
        return super().execute(handle, args, context)


@pytest.fixture
def strict() -> Any:
    Strict.given.clear()
    return Strict.install(dtypes=frozenset({"float32", "int32", "bool"}), no_empty=True)


def _trained(device: Any) -> Tensor:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(7, 8), "drop": torch.nn.Dropout(0.25), "out": torch.nn.Linear(8, 5)}
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.arange(12).remainder(7).to(device)
    labels = torch.arange(12).remainder(5).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model["out"](model["embed"](words)).relu(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "training": _trained,
    "float64": lambda to: torch.linspace(0, 1, 5, dtype=torch.float64).to(to).exp().float() * 2,
    "bfloat16": lambda to: (torch.ones(4, 4).to(to).bfloat16() @ torch.ones(4, 4).to(to).bfloat16()).float() + 1,
    "complex": lambda to: torch.fft.fft(torch.arange(6.0).to(to)).abs() * 2,
    "indices": lambda to: torch.arange(6.0).to(to).reshape(2, 3).max(1),
    "argmax": lambda to: (torch.arange(6.0).to(to).argmax() + 1).to(torch.float32) * 0.5,
    "empty": lambda to: torch.cat([torch.empty(0, 3).to(to), torch.ones(2, 3).to(to) * 2]),
    "made empty": lambda to: (torch.ones(2, 3).to(to)[2:] + 1).sum() + torch.ones(2).to(to),
    "a number": lambda to: torch.ones(3, dtype=torch.float64).to(to) * 0.1 + 0.2,
    "held": lambda to: torch.arange(4).to(to),
}


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_other_dtypes(name: str, mode: str, strict: Any) -> None:
    program = PROGRAMS[name]
    expected = program("cpu")
    with torchport.mode(mode), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = program(strict.device)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert Strict.given == []


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), torch.rand_like], ids=["dropout", "rand_like"])
def test_random_numbers_are_the_same(draw: Callable[[Tensor], Tensor], strict: Any) -> None:
    drawn: list[Tensor] = []
    for device in (Fake.install().device, strict.device):
        torch.manual_seed(3)
        drawn.append(draw(torch.ones(64, device=device)).cpu())
    assert torch.equal(*drawn)
    assert Strict.given == []


def test_what_the_host_does_is_counted_and_refused_by_name(strict: Any) -> None:
    torchport.metrics.reset()
    x = torch.arange(4).to(strict.device)
    assert (x + 1).tolist() == [1, 2, 3, 4]
    assert torchport.metrics.counter("aten::add.Tensor") == 1
    with torchport.config.override(fallback="error"):
        with pytest.raises(
            torchport.UnsupportedOp, match=r"the engine has no int64 \(Capabilities\.dtypes: bool, float"
        ):
            x + 2
        empty = torch.ones(2).to(strict.device)
        with pytest.raises(torchport.UnsupportedOp, match="no empty tensors"):
            empty[2:] * 3
    assert (torch.ones(3).to(strict.device) + 1).tolist() == [2.0] * 3
    assert "no float64" in str(
        torchport.explain(torch.ops.aten.add.Tensor, torch.ones(2).double().to(strict.device), 1)
    )


def test_torch_compile(strict: Any) -> None:
    def model(x: Tensor, at: Tensor) -> Tensor:
        return (x * 2).index_select(0, at).double().sum(1).float() + 1

    given = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2])
    compiled = torch.compile(model, backend="torchport", options={"backend": strict.name})
    torch.testing.assert_close(compiled(*given), model(*given))
    assert Strict.given == []


def test_ahead_of_time(strict: Any, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return (x * 2 + 1).index_select(0, at).exp() * 3, at + 1

    given = torch.arange(12.0).reshape(4, 3) / 12, torch.tensor([0, 2])
    lowered = torchport.aot.lower(Model(), given, backend=strict.name)
    lowered.save(tmp_path / "model.pt2")
    with torchport.runtime.load(tmp_path / "model.pt2").load_method() as method:
        for ours, theirs in zip(method(*given), Model()(*given), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert [piece.backend.name for piece in lowered.pieces["forward"]] == [strict.name] * 2
    assert Strict.given == []


def test_capabilities_that_are_found_out_start_no_engine_before_it_is_used() -> None:
    asked: list[int] = []

    class Late(Strict):
        name = "declares_late"

        @property
        def capabilities(self) -> Capabilities:  # type: ignore[override]
            asked.append(1)
            return Capabilities(dtypes=frozenset({"float32"}))

    torchport.register(Late)
    try:
        torchport.get_backend("declares_late")
        assert asked == []
        x = torch.arange(3).to(torchport.device("declares_late"))
        Strict.given.clear()
        assert (x.float() * 2 + x).tolist() == [0.0, 3.0, 6.0]
        assert not [one for one in Strict.given if "int64" in one]
    finally:
        torchport.registry.unregister("declares_late")


def test_names_that_are_no_dtypes() -> None:
    with pytest.raises(ValueError, match="'float', which is no dtype of PyTorch"):
        Capabilities(dtypes=frozenset({"float", "int32"}))
    assert Capabilities(dtypes=frozenset({torch.float32})).dtypes == {"float32"}  # type: ignore[arg-type]


def test_the_backend_is_the_object_that_was_registered() -> None:
    class Mine(Strict):
        name = "declares_float32"
        capabilities = Capabilities(dtypes=frozenset({"float32"}))

    mine = Mine()
    torchport.register(mine)
    try:
        assert torchport.get_backend("declares_float32") is mine
        assert isinstance(mine, Mine)
        assert type(mine).__qualname__ == Mine.__qualname__
    finally:
        torchport.registry.unregister("declares_float32")
