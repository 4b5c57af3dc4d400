"""``torchport.backend.registry``: names to backends; duplicates, unknown names and broken plugins are told apart."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

import torchport
from torchport.backend import registry as registry_module
from torchport.backend.host import cpu_fallback
from torchport.backend.interface import Backend, BackendDevice, Processed
from torchport.backend.prepare import failure_of
from torchport.backend.registrar import registrar_of
from torchport.backend.registry import Registry, resolve_device
from torchport.core.errors import BackendNotFound, BackendUnavailable, CompileError, ConfigError, TorchportError


class Null(Backend):
    """Computes nothing."""

    name: ClassVar[str] = "null"

    def preprocess(self, graph: Any, specs: Any) -> Processed:
        return Processed(b"")

    def execute(self, handle: Any, args: Any, context: Any) -> Sequence[Any]:
        return []


class Absent(Null):
    name = "absent"

    def is_available(self) -> bool:
        return False

    def unavailable_reason(self) -> str:
        return "pip install chip"


def entry_points(*points: tuple[str, str]) -> Callable[..., list[importlib.metadata.EntryPoint]]:
    made = [importlib.metadata.EntryPoint(name, value, "some.group") for name, value in points]
    return lambda group: [point for point in made if group == point.group]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """A registry that finds these entry points."""

    def make(*points: tuple[str, str]) -> Registry:
        monkeypatch.setattr(registry_module.importlib.metadata, "entry_points", entry_points(*points))
        return Registry("some.group")

    return make


def test_a_class_is_made_once_and_only_when_asked_for() -> None:
    made: list[int] = []

    class Counted(Null):
        def __init__(self) -> None:
            made.append(1)

    registry = Registry()
    assert registry.register(Counted) == "null"
    assert (registry.names(), made) == (["null"], [])
    assert registry.get("null") is registry.get("null")
    assert made == [1]


def test_an_instance_and_a_factory_and_another_name() -> None:
    registry, instance = Registry(), Null()
    registry.register(instance)
    registry.register(lambda: Null(), name="made")
    registry.register(Null, name="again")
    assert registry.get("null") is instance
    assert isinstance(registry.get("made"), Null)
    assert registry.names() == ["again", "made", "null"]


def test_many_threads_get_one_instance() -> None:
    barrier = threading.Barrier(8)
    registry = Registry()
    registry.register(Null)
    found: list[Backend] = []

    def work() -> None:
        barrier.wait()
        found.append(registry.get("null"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("name", ["", "two words", "1st", None, 3])
def test_a_name_must_be_an_identifier(name: Any) -> None:
    class Nameless(Null):
        pass

    Nameless.name = name
    with pytest.raises(TorchportError, match="identifier"):
        Registry().register(Nameless)


def test_a_duplicate_is_refused_with_its_origin() -> None:
    registry = Registry()
    registry.register(Null)
    with pytest.raises(TorchportError, match=r"'null' is registered already \(registered by .*test_registry\)"):
        registry.register(Null)
    registry.unregister("null")
    registry.register(Null)


def test_an_unknown_name_lists_the_known() -> None:
    registry = Registry()
    registry.register(Null)
    for ask in (registry.get, registry.unregister):
        with pytest.raises(BackendNotFound, match=r"no backend is called 'nul'; registered are: null\."):
            ask("nul")
    assert registry.get_optional("nul") is None
    with pytest.raises(BackendNotFound, match="registered are: none"):
        Registry().get("null")


def test_an_unavailable_backend_says_what_to_do() -> None:
    registry = Registry()
    registry.register(Absent)
    with pytest.raises(BackendUnavailable, match="'absent' is installed but cannot run here: pip install chip"):
        registry.get("absent")
    assert registry.get_optional("absent") is None


def test_the_list_has_a_row_for_each() -> None:
    registry = Registry()
    registry.register(Null)
    registry.register(Absent)
    absent, null = registry.list()
    assert (absent.name, absent.available) == ("absent", False)
    assert "pip install chip" in absent.reason
    assert (null.name, null.available, null.reason) == ("null", True, "")


def raises_value_error() -> Backend:
    raise ValueError("no licence")


def raises_config_error() -> Backend:
    raise ConfigError("CHIP_MODE is malformed")


def gives_a_string() -> Any:
    return "backend"


class AvailabilityRaises(Null):
    def is_available(self) -> bool:
        raise OSError("driver gone")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (raises_value_error, "ValueError: no licence"),
        (raises_config_error, "ConfigError: CHIP_MODE"),
        (gives_a_string, "gave a str"),
        (AvailabilityRaises, "OSError: driver gone"),
    ],
)
def test_a_broken_plugin_is_named_and_does_not_hide_the_others(factory: Any, said: str) -> None:
    registry = Registry()
    registry.register(factory, name="broken")
    registry.register(Null)
    with pytest.raises(BackendUnavailable, match="'broken'") as caught:
        registry.get("broken")
    assert said in str(caught.value)
    assert "test_registry" in str(caught.value)
    assert [(row.name, row.available) for row in registry.list()] == [("broken", False), ("null", True)]


def test_entry_points_are_found_but_not_imported(plugins: Callable[..., Registry]) -> None:
    registry = plugins(("ours", "torchport.backends.reference:ReferenceBackend"), ("gone", "no_such_module:X"))
    assert registry.names() == ["gone", "ours"]
    assert registry.get("ours").name == "reference"
    with pytest.raises(BackendUnavailable, match=r"'gone' \(entry point no_such_module:X\) failed to load: ModuleNotF"):
        registry.get("gone")


def test_registering_over_an_entry_point_is_refused(plugins: Callable[..., Registry]) -> None:
    registry = plugins(("null", "no_such_module:X"))
    with pytest.raises(TorchportError, match="entry point no_such_module:X"):
        registry.register(Null)


def test_two_packages_with_one_name_do_not_win_by_chance(plugins: Callable[..., Registry]) -> None:
    registry = plugins(("chip", "package_a:X"), ("chip", "package_b:X"))
    with pytest.raises(BackendUnavailable, match=r"package_a:X and entry point package_b:X; uninstall one"):
        registry.get("chip")


def test_one_package_listed_twice_is_one(plugins: Callable[..., Registry]) -> None:
    value = "torchport.backends.reference:ReferenceBackend"
    assert plugins(("ours", value), ("ours", value)).get("ours").name == "reference"


def test_our_backends_are_registered() -> None:
    rows = {row.name: row for row in torchport.registry.list()}
    assert rows["reference"].available
    assert "inductor" in rows


def test_a_class_of_a_module_without_a_spec_is_nothing_that_another_process_can_import() -> None:
    module = types.ModuleType("a_module_without_a_spec")
    exec("from test_registry import Null\nclass Chip(Null):\n    name = 'chip_without_a_spec'", module.__dict__)
    made = Registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(module.Chip, "__module__", module.__name__)
        made.register(module.Chip)
        assert made.recipe(made.get("chip_without_a_spec")) is None
    made.register(Null)
    assert made.recipe(made.get("null")) == f"{__name__}:Null"


def test_an_operator_that_a_backend_names_is_the_errors() -> None:
    chip = Null()
    named = failure_of(
        chip, CompileError("no such shape", op="aten.mm.default", source="model.py:3"), "a graph", "x.py:1"
    )
    assert (named.op, named.source) == ("aten.mm.default", "model.py:3")
    assert str(named).count("aten.mm.default") == 1
    plain = failure_of(chip, ValueError("no such shape"), "a graph", "x.py:1")
    assert (plain.op, plain.source) == ("a graph", "x.py:1")


def test_a_name_is_free_again_once_its_backend_is_gone() -> None:
    """Kernels that hold nothing of the backend let it go, and stayed registered under its name."""

    class Passing(Null):
        name = "passing"

        def register_kernels(self, registrar: Any) -> None:
            registrar.fallback("Dense", cpu_fallback)

    first = Passing()
    known = weakref.ref(first)
    registrar_of(first)
    del first
    gc.collect()
    assert known() is None
    second = Passing()
    assert registrar_of(second).boxed is cpu_fallback
    registrar_of(second).remove_all()


def test_ordinals() -> None:
    class Two(Null):
        def devices(self) -> Sequence[BackendDevice]:
            return [BackendDevice("npu", 0), BackendDevice("npu", 1)]

    assert resolve_device(Two(), 1) == BackendDevice("npu", 1)
    with pytest.raises(BackendUnavailable, match="no device 2; it has: npu:0, npu:1"):
        resolve_device(Two(), 2)
