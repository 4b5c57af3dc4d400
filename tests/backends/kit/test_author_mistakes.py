"""What the author of a backend may do wrong, method by method, and what each mistake is told.

``docs/author-mistakes.md`` is made of this table: ``python tests/backends/kit/test_author_mistakes.py`` writes it.
"""

# ruff: noqa: E501 - a table, a line per row

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Fake

import torchport
from torchport import Processed, TensorData, TensorSpec
from torchport.backends.reference import ReferenceBackend

PAGE = Path(__file__).parents[3] / "docs" / "author-mistakes.md"
aten = torch.ops.aten


def _add(fake: Any) -> None:
    x = torch.ones(3).to(fake.device)
    (x + x).cpu()


def _two(fake: Any) -> None:
    x = torch.ones(3).to(fake.device)
    a, b = x + 1, x * 2
    torchport.sync()
    assert (a.sum() + b.sum()).item() == 12


def _compile(fake: Any) -> None:
    torch.compiler.reset()
    options = {"backend": fake.name, "no.such": "1"}
    try:
        torch.compile(lambda x: x + 1, backend="torchport", options=options)(torch.ones(3))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from error


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _lower(fake: Any) -> None:
    torchport.aot.lower(_Model(), (torch.ones(3),), backend=fake.name, compile_specs={fake.name: {"no.such": "1"}})


def _lowered(fake: Any) -> None:
    torchport.aot.lower(_Model(), (torch.ones(3),), backend=fake.name)


def _result(context: Any, tensor: torch.Tensor) -> TensorData:
    return TensorData(context.device, TensorSpec.of(tensor), tensor)


def _execute(make: Callable[..., Any]) -> Callable[..., Any]:
    """An ``execute`` that changes what the right one returns."""

    def execute(self: Any, handle: Any, args: Any, context: Any) -> Any:
        return make(self, args, context, ReferenceBackend.execute(self, handle, args, context))

    return execute


def _mutates(self: Any, args: Any, context: Any, right: Any) -> Any:
    args[0].tensor.add_(1)
    return right


def _keeps(self: Any, args: Any, context: Any, right: Any) -> Any:
    self.__dict__.setdefault("kept", []).append(args[0].tensor)
    return right


def _keeps_value(self: Any, args: Any, context: Any, right: Any) -> Any:
    self.__dict__.setdefault("kept", []).append(args[0])
    return right


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


@dataclass
class Mistake:
    """One mistake: the method, what is done wrong, the attributes that do it, and what the error is."""

    method: str
    what: str
    attributes: dict[str, Any]
    error: type[BaseException]
    says: str
    program: Callable[[Any], None] = _add
    checked: bool = False
    """Found with ``config.check_backends`` only."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def id(self) -> str:
        return f"{self.method}: {self.what}"


T, C, E, U, K = (
    torchport.TorchportError, torchport.CompileError, torchport.ExecutionError, torchport.BackendUnavailable,
    torchport.ContractError,
)  # fmt: skip


class _Late(RuntimeError):
    """An engine's own exception."""


MISTAKES = [
    Mistake("supports", "returns True or False", {"supports": lambda self, node: False}, K, "a bool, False"),
    Mistake("supports", "returns nothing", {"supports": lambda self, node: None}, K, r"returned None.*aten\.add\.Tensor"),
    Mistake("supports", "returns text", {"supports": lambda self, node: "no"}, K, "a str, 'no'"),
    Mistake("supports", "raises", {"supports": _raise(KeyError("val"))}, K, r"raised KeyError: 'val'.*aten\.add\.Tensor"),
    Mistake("decompositions", "returns a list", {"decompositions": lambda self: [1]}, K, "a list.*operator"),
    Mistake("decompositions", "raises", {"decompositions": _raise(_Late("no table"))}, K, "raised _Late: no table"),
    Mistake("decompositions", "keys are names", {"decompositions": lambda self: {"aten::add": abs}}, K, "a str, 'aten::add'"),
    Mistake("devices", "returns no device", {"devices": lambda self: ()}, U, "has no device 0; it has: none"),
    Mistake("devices", "returns names", {"devices": lambda self: ("cpu",)}, U, "BackendDevice"),
    Mistake("devices", "raises", {"devices": _raise(_Late("driver"))}, U, "raised _Late: driver"),
    Mistake("is_available", "raises", {"is_available": _raise(_Late("no library"))}, U, "failed to say whether.*no library"),
    Mistake("is_available", "says no, and not why", {"is_available": lambda self: False}, U, r"is_available\(\) returned False"),
    Mistake("capabilities", "is a dict", {"execute": {"capabilities": {"donation": True}}}, T, "capabilities is a dict"),
    Mistake("capabilities", "a former name of the contract", {"execute": {"torch_free": True}}, T, "torch_free: write"),
    Mistake("register_kernels", "an operator PyTorch does not have",
            {"register_kernels": lambda self, r: r.impl("aten::ad", "Dense", abs)}, torchport.DispatchError, "no operator 'aten::ad'"),
    Mistake("register_kernels", "a key that does not exist",
            {"register_kernels": lambda self, r: r.impl("aten::sin", "Dens", lambda x: x)}, torchport.DispatchError, "Dens"),
    Mistake("register_kernels", "a kernel with other parameters",
            {"register_kernels": lambda self, r: r.impl("aten::sin", "Dense", lambda: 1)}, torchport.DispatchError, "signature"),
    Mistake("register_kernels", "an operator that never arrives",
            {"register_kernels": lambda self, r: r.impl("aten::linear", "Dense", lambda *a, **k: 1)},
            torchport.DispatchError, "would never be called"),
    Mistake("to_device", "returns a tensor", {"to_device": lambda self, tensor, device: tensor}, K, "a Tensor.*return a BackendData"),
    Mistake("to_device", "returns nothing", {"to_device": lambda self, tensor, device: None}, K, "returned None"),
    Mistake("to_device", "returns another shape",
            {"to_device": lambda self, tensor, device: TensorData(device, TensorSpec.of(tensor[:1]), tensor[:1])}, K,
            r"says it is float32\[1\]; the tensor is float32\[3\]"),
    Mistake("to_device", "returns another dtype",
            {"to_device": lambda self, tensor, device: TensorData(device, TensorSpec.of(tensor.double()), tensor.double())},
            K, r"says it is float64\[3\]"),
    Mistake("to_device", "raises", {"to_device": _raise(_Late("out of memory"))}, E, "failed to copy a tensor to the device.*out of memory"),
    Mistake("from_device", "returns a NumPy array", {"from_device": lambda self, data: data.tensor.numpy()}, K, "a ndarray"),
    Mistake("from_device", "returns another dtype", {"from_device": lambda self, data: data.tensor.double()}, K, "returned a float64"),
    Mistake("from_device", "returns another shape", {"from_device": lambda self, data: data.tensor[:2]}, K, r"returned a float32\[2\]"),
    Mistake("from_device", "returns a device tensor", {"from_device": lambda self, data: data.tensor.to("meta")}, K, "a tensor on meta"),
    Mistake("from_device", "raises", {"from_device": _raise(_Late("bus"))}, E, "failed to copy a tensor to the host: _Late: bus"),
    Mistake("preprocess", "returns bytes", {"preprocess": lambda self, graph, specs: b"code"}, C, "a bytes.*torchport.Processed"),
    Mistake("preprocess", "returns nothing", {"preprocess": lambda self, graph, specs: None}, C, "returned None"),
    Mistake("preprocess", "data is text", {"preprocess": lambda self, graph, specs: Processed("code")}, C, "data is a str"),  # type: ignore[arg-type]
    Mistake("preprocess", "raises", {"preprocess": _raise(_Late("syntax"))}, C, "failed to compile: _Late: syntax"),
    Mistake("preprocess", "returns bytes, ahead of time", {"preprocess": lambda self, graph, specs: b"code"}, C,
            "a bytes.*torchport.Processed", _lowered),
    Mistake("preprocess", "is given an unknown option", {"compile_options": {"my.level": "how much"}},
            torchport.ConfigError, r"no\.such", _compile),
    Mistake("preprocess", "is given an unknown compile spec", {"compile_options": {"my.level": "how much"}},
            torchport.ConfigError, r"reads no compile spec 'no\.such'; it reads: my\.level", _lower),
    Mistake("init", "raises", {"init": _raise(_Late("bad code"))}, C, "failed to compile: _Late: bad code"),
    Mistake("execute", "returns one value, not a list", {"execute": _execute(lambda s, a, c, right: right[0])}, E, "returned a TensorData; return a list"),
    Mistake("execute", "returns nothing", {"execute": lambda self, handle, args, context: None}, E, "returned a NoneType"),
    Mistake("execute", "returns too many", {"execute": _execute(lambda s, a, c, right: [*right, *right])}, E, "returned 2 values for 1 outputs"),
    Mistake("execute", "returns too few", {"execute": _execute(lambda s, a, c, right: [])}, E, "returned 0 values for 1 outputs"),
    Mistake("execute", "returns tensors", {"execute": _execute(lambda s, a, c, right: [r.tensor for r in right])}, E, "output 0 is a Tensor; return BackendData"),
    Mistake("execute", "returns another dtype",
            {"execute": _execute(lambda s, a, c, right: [_result(c, r.tensor.double()) for r in right])}, E, r"output 0 is float64\[3\], but the graph says float32\[3\]"),
    Mistake("execute", "returns another shape",
            {"execute": _execute(lambda s, a, c, right: [_result(c, r.tensor[:1]) for r in right])}, E, r"output 0 is float32\[1\], but"),
    Mistake("execute", "a value that is not what it says",
            {"execute": _execute(lambda s, a, c, right: [TensorData(c.device, r.spec, r.tensor[:1]) for r in right])}, E, r"but holds a Tensor of shape \[1\]"),
    Mistake("execute", "raises", {"execute": _raise(_Late("lost"))}, E, "failed to execute: _Late: lost"),
    Mistake("execute", "changes an argument", {"execute": _execute(_mutates), "donation": False, "restores_donated": False}, E,
            r"changed its argument 0 \(float32\[3\]\)", checked=True),
    Mistake("execute", "keeps an argument's memory", {"execute": _execute(_keeps), "donation": False, "restores_donated": False}, E,
            "kept its argument 0", checked=True),
    Mistake("execute", "keeps an argument", {"execute": _execute(_keeps_value), "donation": False, "restores_donated": False}, E,
            "kept its argument 0", checked=True),
    Mistake("execute", "returns an argument",
            {"execute": _execute(lambda s, a, c, right: [_result(c, a[0].tensor)]), "donation": False, "restores_donated": False}, E,
            "result 0 in the memory of argument 0", checked=True),
    Mistake("execute", "returns one result as a view of another",
            {"execute": _execute(lambda s, a, c, right: [_result(c, right[0].tensor[:]) for _ in right]), "donation": False, "restores_donated": False},
            E, "result 1 in the memory of result 0", _two, checked=True),
]  # fmt: skip


def _message(mistake: Mistake) -> tuple[type[BaseException], str]:
    """What the mistake is told."""
    attributes = dict(mistake.attributes)
    try:
        if isinstance(attributes.get("execute"), dict):  # what is wrong with the class itself
            type("Fake", (ReferenceBackend,), attributes["execute"])
        else:
            with torchport.config.override(check_backends=mistake.checked):
                mistake.program(_installed(attributes))
    except mistake.error as error:
        return type(error), str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead: {error}") from error
    raise AssertionError("the mistake went unnoticed")


def _installed(attributes: dict[str, Any]) -> Any:
    """A fake with these attributes. Its index is noted whatever becomes of it."""
    return Fake.install(**attributes)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_a_mistake_is_told(mistake: Mistake) -> None:
    kind, message = _message(mistake)
    assert issubclass(kind, mistake.error)
    assert re.search(mistake.says, message, re.DOTALL), message
    assert "backend" in message or "fake_" in message or "aten::" in message
    assert "Tensor(" not in message, "a message shows what values are, not what is in them"


def test_what_is_right_passes_the_switch() -> None:
    fake = Fake.install()
    with torchport.config.override(check_backends=True):
        _add(fake)
        _two(fake)
        x = torch.ones(3, device=fake.device).requires_grad_()
        (x.exp() * x).sum().backward()
        assert x.grad is not None
        x.grad.cpu()


CRASHES = {
    "crashes": "def execute(self, handle, args, context):\n        import os, signal\n        os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "def execute(self, handle, args, context):\n        import time\n        time.sleep(3600)",
}
"""What no error can tell, because nothing runs after it: the conformance kit runs backends in processes of their own."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CRASHES)
def test_crashes_and_hangs_are_told_by_the_conformance_kit(kind: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from torchport.backends.reference import ReferenceBackend\n\n"
        f"class Broken(ReferenceBackend):\n    name = 'broken_{kind}'\n    {CRASHES[kind]}\n"
    )
    command = [sys.executable, "-m", "torchport.cli", "conform", f"{tmp_path / 'broken.py'}:Broken", "--ops", "^sin$"]
    command += ["--variants", "forward", "--samples", "1", "--case-seconds", "20", "-n", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 1, done.stderr
    assert {"crashes": "crashed", "hangs": "hung"}[kind] in done.stdout


def test_every_handle_is_given_back() -> None:
    """A leak is the backend's own where ``destroy`` does not let go: it is called once for each handle, and for all."""
    made: list[Any] = []
    destroyed: list[Any] = []

    def init(self: Any, processed: Any, specs: Any, context: Any) -> Any:
        made.append(ReferenceBackend.init(self, processed, specs, context))
        return made[-1]

    fake = Fake.install(init=init, destroy=lambda self, handle: destroyed.append(handle))
    _add(fake)
    _two(fake)
    assert made
    assert destroyed == []  # both may run again
    with torchport.config.override(max_computations=1):  # the others leave memory, though their plans are known
        (torch.ones(4).to(fake.device) * 3).cpu()
    gc.collect()
    times = [sum(one is handle for one in destroyed) for handle in made]
    assert times == [1] * (len(made) - 1) + [0]
    assert len(destroyed) == sum(times)


def _page() -> str:
    rows = []
    for mistake in MISTAKES:
        kind, message = _message(mistake)
        text = re.sub(r"fake_\d+", "mine", message.split("\n  op:")[0])
        text = re.sub(r"port:\d+", "port:1", text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
        switch = " (with the switch)" if mistake.checked else ""
        rows.append(f"| `{mistake.method}` | {mistake.what}{switch} | `{kind.__name__}` | {' '.join(text.split())} |")
    return _HEAD + "\n".join(rows) + "\n"


_HEAD = """# Mistakes, and what they are told

What the author of a backend may do wrong, method by method, and the error that each mistake raises. A test makes every
mistake and checks this table; `python tests/backends/kit/test_author_mistakes.py` writes the table.

`torchport.config.check_backends = True` (or `TORCHPORT_CHECK_BACKENDS=1`) is the switch: after each computation
torchport checks whether `execute` changed an argument, kept one, or returned memory that an argument or another result
uses. The check copies every argument, so it is for debugging. A crash or a hang cannot be seen from inside the process:
the [conformance kit](conformance.md) reports them, since it runs a backend in processes of its own.

| method | mistake | error | message |
|---|---|---|---|
"""


def test_the_page_is_what_the_messages_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == _page(), "run: python tests/backends/kit/test_author_mistakes.py"


if __name__ == "__main__":
    PAGE.write_text(_page(), encoding="utf-8")
