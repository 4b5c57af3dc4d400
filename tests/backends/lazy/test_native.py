"""torchport's own C++ libraries: they do what its Python does, and are built and loaded only where that is safe."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_support import COMPILER, compiles, said_without_and_with
from torch import nn

import torchport
from torchport import native
from torchport.backend.interface import TensorData
from torchport.backends.inductor import caller
from torchport.core.specs import TensorSpec
from torchport.frontend.device.native import use_flush
from torchport.native.twins import table, table_text, twins
from torchport.run.future import Future
from torchport.trace.handle import LazyTensor
from torchport.trace.threads import threads
from torchport.trace.wrapping import unwrap


@pytest.fixture(params=["python", pytest.param("native", marks=compiles)])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What is done to every handle when a trace ends, and to gradients, is done by one of the two."""
    torchport.use("reference")
    torch.ones(1, device="port")
    for name, python in twins.in_python.items():
        monkeypatch.setattr(twins, name, python)
    if request.param == "native":
        native.build_all([str(COMPILER)])
        found = native.flush.load()
        assert found is not None, "it was not built: see the log"
        use_flush(found)
        assert twins.in_cpp() == list(twins.in_python)
    yield request.param
    torchport.sync()


WRITES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "apart": lambda a: torch._foreach_mul_(a, 2.0),
    "two lists": lambda a: torch._foreach_add_(a, [x + 1 for x in a], alpha=3),
    "itself": lambda a: torch._foreach_add_(a, a),
    "one twice": lambda a: torch._foreach_add_([a[0], a[0]], 1.0),
    "views": lambda a: torch._foreach_add_([a[0][:2], a[0][1:]], [a[1][:2], a[1][1:]]),
    "without gradients": lambda a: torch._foreach_mul_([a[0], a[0].detach()], 3.0),
    "expanded": lambda a: torch._foreach_add_([a[0]], [a[1][:1].expand(3)]),
    "transposed": lambda a: torch._foreach_add_([x.view(1, 3).t() for x in a], [x.view(3, 1) + 1 for x in a]),
    "none": lambda a: torch._foreach_zero_(a[:1]),
    "a tuple": lambda a: torch._foreach_sqrt_(tuple(a)),
    "computed": lambda a: torch._foreach_exp_([a[0], a[1]]) or torch._foreach_neg_(a),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("index", [0, 1])
def test_lists_are_written_as_on_the_cpu(form: str, name: str, index: int) -> None:
    device = torchport.device("reference") if index else torch.device("port", 0)
    lists = []
    for place in ("cpu", device):
        tensors = [torch.tensor([1.0, 2.0, 3.0]).to(place), torch.tensor([0.5, 0.25, 4.0]).to(place)]
        views = [tensor[1:] for tensor in tensors]
        WRITES[name](tensors)
        lists.append([value.tolist() for value in (*tensors, *views)])
        assert tensors[0]._version > 0
    assert lists[0] == lists[1]


def test_many_objects_are_made_at_once(form: str) -> None:
    class Base:
        __slots__ = ("__weakref__", "a")

    class Made(Base):
        __slots__ = ("b", "c")

        def __init__(self) -> None:
            raise AssertionError("it is not called")

    shared, each = object(), [object(), object()]
    made = twins.make_each(Made, {"a": shared}, {"b": each, "c": (1, 2)})
    assert [type(one) for one in made] == [Made, Made]
    assert [(one.a, one.b, one.c) for one in made] == [(shared, each[0], 1), (shared, each[1], 2)]
    before = sys.getrefcount(shared)
    assert gc.is_tracked(made[0])
    del made
    assert sys.getrefcount(shared) == before - 2
    assert twins.make_each(Made, {"a": shared}, {"b": []}) == []
    with pytest.raises(ValueError, match=r"equally long|shorter|longer"):
        twins.make_each(Made, {}, {"b": [1, 2], "c": [1]})
    with pytest.raises(AttributeError):
        twins.make_each(Made, {}, {"d": [1]})


def test_values_are_given_to_all_who_want_them(form: str) -> None:
    spec = TensorSpec((2,), torch.float32, (1,))
    handles = [unwrap(torch.ones(2, device="port")) for _ in range(3)]
    first, second = object(), object()
    twins.give([handles[:2], (handles[2],)], [first, second], (spec, spec))
    assert [handle.value for handle in handles] == [first, first, second]
    assert all(handle.spec is spec for handle in handles)
    with pytest.raises(ValueError, match=r"equally long|shorter|longer"):
        twins.give([handles], [first, second], [spec])
    for handle in handles:
        handle.value = None


def test_what_autograd_saved_may_not_be_written(form: str) -> None:
    x = torch.ones(2, device="port", requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    with torch.no_grad():
        torch._foreach_add_([y], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lists_of_several_devices_are_refused(form: str) -> None:
    mine = torch.ones(2, device="port")
    with pytest.raises(RuntimeError):
        torch._foreach_add_([mine, torch.ones(2)], [mine, mine])
    assert mine.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_training(form: str, optimizer: Any) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        chosen = optimizer(net.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
        for _ in range(4):
            chosen.zero_grad()
            net(torch.ones(3, 4, device=device)).square().mean().backward()
            chosen.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    for got, expected in zip(trained("port"), trained("cpu"), strict=True):
        torch.testing.assert_close(got, expected)


def _handles_of(trace: Any) -> list[LazyTensor]:
    """Everything a trace has made: in its nodes' pools, and besides."""
    made, node = list(trace.made), trace.cursor
    while node.parent is not None:
        made += node.ready if isinstance(node.ready, (list, tuple)) else [node.ready]
        node = node.parent
    return [handle for handle in made if handle is not None]


@compiles
def test_both_see_the_same_handles_alive() -> None:
    """Held by Python, by the autograd graph, by a node's pool alone, by nobody."""
    native.build_all([str(COMPILER)])
    library = native.flush.load()
    assert library is not None
    torchport.use("reference")
    x = torch.ones(4, device="port", requires_grad=True)
    use_flush(library)
    for _ in range(4):  # from the second time on nodes hand out what is in their pools
        kept = x * 2
        graph = (kept * 3).exp().sum()
        torch.split(kept.detach() + 1, 2)
        (kept + 1).relu()
        made = _handles_of(threads.of(0))
        expected = list(map(id, twins.in_python["alive"](made)))
        assert list(map(id, twins.alive(made))) == expected
        assert 0 < len(expected) < len(made)
        del made, graph, kept
        torchport.sync()


def test_results_that_are_held_as_one_or_in_part(form: str) -> None:
    """By Python code, across flushes, while their node hands out others."""
    kept: list[Any] = []
    for step in range(5):
        x = torch.arange(8.0).to("port") + step
        parts = torch.split(x * 2, 2)
        kept.append((parts, torch.split(x + 1, 4)[1], x.sort(descending=True)))
        torchport.sync()
    for step, (parts, part, ordered) in enumerate(kept):
        expected = torch.arange(8.0) + step
        assert torch.cat([p.cpu() for p in parts]).tolist() == (expected * 2).tolist()
        assert part.tolist() == (expected + 1)[4:].tolist()
        assert ordered.values.tolist() == sorted(expected.tolist(), reverse=True)
        assert ordered.indices.tolist() == list(range(7, -1, -1))


def test_results_that_a_profiler_holds(form: str) -> None:
    """Whoever asks the collector for all objects holds every node's results as one."""
    for step in range(4):
        x = torch.arange(6.0).to("port") + step
        values, places = x.view(2, 3).max(1)
        parts = torch.split(x, 3)
        everything = gc.get_objects()
        torchport.sync()
        del everything
        assert (values.tolist(), places.tolist()) == ([step + 2.0, step + 5.0], [2, 2])
        assert [part.tolist() for part in parts] == [[step + 0.0, step + 1, step + 2], [step + 3.0, step + 4, step + 5]]


def _future_of(data: TensorData, job: list[Future] | None = None) -> Future:
    """A future that is settled, or that ``job`` is to settle."""
    future = Future.__new__(Future)
    future.data, future.job = data, job  # type: ignore[assignment]
    if job is not None:
        job.append(future)
    return future


def test_the_values_of_some_leaves(form: str) -> None:
    device = torchport.get_backend("reference").devices()[0]
    spec = TensorSpec((2,), torch.float32, (1,))
    leaves: list[Any] = [unwrap(torch.ones(2, device="port")) for _ in range(4)]
    values: list[Any] = [TensorData(device, spec, None) for _ in leaves]
    values[3] = _future_of(values[2])
    for leaf, value in zip(leaves, values, strict=True):
        leaf.value = value
    found, waits = twins.leaf_values(leaves, (2, 0, 2), Future)
    assert list(map(id, found)) == [id(values[at]) for at in (2, 0, 2)]
    assert not waits
    found, waits = twins.leaf_values(leaves, (3, 1), Future)
    assert list(map(id, found)) == [id(values[at]) for at in (3, 1)]
    assert waits
    assert twins.leaf_values(leaves, (), Future) == ([], False)
    with pytest.raises(IndexError):
        twins.leaf_values(leaves, (4,), Future)
    for leaf in leaves:
        leaf.value = None


def test_handles_that_are_held_are_found_among_hundreds(form: str) -> None:
    """Of a path that is longer than what is looked at at one time, with results alone and in lists."""
    for step in range(4):
        x = torch.arange(6.0).to("port") + step
        kept: list[torch.Tensor] = []
        for at in range(150):
            x = x + 1 if at % 3 else torch.split(x * 1, 3)[0].repeat(2)
            if at % 40 == 1:
                kept.append(x)
        torchport.sync()
        expected = torch.arange(6.0) + step
        for at in range(150):
            expected = expected + 1 if at % 3 else torch.split(expected, 3)[0].repeat(2)
            if at % 40 == 1:
                assert torch.equal(kept.pop(0).cpu(), expected)
        assert not kept


def test_only_what_nobody_holds_is_given_away(form: str) -> None:
    device = torchport.get_backend("reference").devices()[0]
    spec = TensorSpec((), torch.float32, ())
    made = [TensorData(device, spec, None) for _ in range(8)]
    held, exported = made[1:3]
    exported.exported = True
    in_flight: list[Future] = []
    watched, watched_in_flight = _future_of(made[4]), _future_of(made[6], in_flight)
    futures = [_future_of(made[3]), watched, _future_of(made[5], in_flight), watched_in_flight]
    given: list[Any] = [*made[:3], *futures]
    args: list[Any] = made
    numbers = args[-1]
    del exported, futures, made
    assert twins.unshared(given, args) == {0, 3, 5}
    del numbers
    assert twins.unshared(given, args) == {0, 3, 5, 7}
    del held, watched, watched_in_flight
    assert twins.unshared(given, args) == {0, 1, 3, 4, 5, 6, 7}


def test_gradients_get_wrappers_of_their_own_where_nobody_can_tell(form: str) -> None:
    net, touched = nn.Linear(3, 2).to("port"), nn.Linear(3, 2).to("port")
    shared, watched = nn.Linear(3, 2).to("port"), nn.Linear(3, 2).to("port")
    for layer in (net, shared, watched, touched):
        layer(torch.ones(4, 3, device="port")).sum().backward()
    seen = watched.weight.grad
    storage_of: Any = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]
    assert touched.weight.grad is not None
    former = touched.weight.grad._cdata
    storage_of(touched.weight.grad)  # the gradient and its storage keep their Python objects from now on
    shared.bias.grad = shared.weight.grad[:, 0]
    for layer in (net, shared, watched, touched):
        twins.own_gradients(list(layer.parameters()))
    assert touched.weight.grad._cdata != former
    assert watched.weight.grad is not None
    assert watched.weight.grad is seen
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[4.0] * 3] * 2
    shared.weight.grad.mul_(2)
    assert shared.bias.grad.tolist() == [8.0, 8.0]
    assert shared.weight.grad.tolist() == [[8.0] * 3] * 2


GUARD = """
import torch, torchport
torchport.use("reference")
x = torch.ones(3, device="port", requires_grad=True)
(x * x).sum().backward()
from torchport import native
print(native.guard.load() is not None)
print(x.grad.tolist(), torch.accelerator.current_device_index(), torch.accelerator.device_count())
print(torch.accelerator.current_stream(), torch.port.current_device(), torch.get_device_module("port").device_count())
event = torch.Event("port"); event.record(); print(event.query())
with torch.device("port"):
    print(torch.empty(2).device)
y = torch.ones(2, device=torchport.device("reference"), requires_grad=True)
(y * y).sum().backward(); print(y.grad.device.type, y.grad.tolist())
"""


@compiles
def test_the_guards_answer_the_same() -> None:
    native.build_all([str(COMPILER)])
    said = said_without_and_with(GUARD)
    assert [lines.pop(0) for lines in said] == ["False", "True"]
    assert said[0] == said[1]


# -- building and finding --------------------------------------------------------------------------------------------
@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> native.NativeLibrary:
    """A library of its own, in a folder of its own."""
    monkeypatch.setattr(native, "_all", [])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    return native.NativeLibrary(source, ["c10"])


@compiles
def test_whoever_waits_for_a_library_gets_it(library: native.NativeLibrary) -> None:
    answers: list[int] = []
    library.when_there(lambda found: answers.append(found.answer()))
    assert library.load() is None
    native.build_all([str(COMPILER)])
    assert answers == [42]
    library.when_there(lambda found: answers.append(found.answer() + 1))
    assert answers == [42, 43]


@compiles
def test_what_others_could_have_changed_is_not_loaded(library: native.NativeLibrary) -> None:
    native.build_all([str(COMPILER)])
    for path, mode in ((library.path, 0o777), (library.path.parent, 0o722)):
        former = path.stat().st_mode
        path.chmod(mode)
        library._loaded = None
        assert library.load() is None
        path.chmod(former)
        assert library.load() is not None


@compiles
def test_the_users_mask_does_not_matter(library: native.NativeLibrary) -> None:
    before = os.umask(0o002)
    try:
        native.build_all([str(COMPILER)])
    finally:
        os.umask(before)
    assert library.load() is not None


@compiles
def test_links_are_not_followed(library: native.NativeLibrary, tmp_path: Path) -> None:
    native.build_all([str(COMPILER)])
    library._loaded = None
    folder = library.path.parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert library.load() is None


@compiles
def test_what_another_process_has_built_meanwhile_is_used(library: native.NativeLibrary) -> None:
    answers: list[int] = []
    library.when_there(lambda found: answers.append(found.answer()))
    library.build([str(COMPILER)], Path("nowhere"))
    assert not answers
    native.build_all(["no such compiler is needed"])
    assert answers == [42]


@pytest.mark.parametrize("in_the_way", ["a file", "a folder of everybody's"])
def test_a_folder_that_cannot_be_used_is_told(
    library: native.NativeLibrary, caplog: pytest.LogCaptureFixture, in_the_way: str
) -> None:
    if in_the_way == "a file":
        library.path.parent.touch()
    else:
        library.path.parent.mkdir()
        library.path.parent.chmod(0o777)
    with caplog.at_level(logging.INFO, "torchport.native"):
        native.build_all(["there is no such compiler"])
    assert "answer.cpp was not built, Python does its work: " in caplog.text
    assert library.load() is None


def test_what_cannot_be_built_is_told_and_done_without(
    library: native.NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    library.when_there(lambda found: pytest.fail("there is no library"))
    with caplog.at_level(logging.INFO, "torchport.native"):
        native.build_all([sys.executable, "-c", "import sys; sys.exit('no such option')"])
        native.build_all([sys.executable, "-c", "raise SystemExit('tried again')"])
        native._tried.discard(library)
        native.build_all(["there is no such compiler"])
    assert "answer.cpp was not built, Python does its work: no such option" in caplog.text
    assert "tried again" not in caplog.text
    assert "No such file or directory: 'there is no such compiler'" in caplog.text
    assert library.load() is None


@compiles
def test_the_setting_forbids_both(library: native.NativeLibrary) -> None:
    with torchport.config.override(native=False):
        native.build_all([str(COMPILER)])
        assert not library.path.exists()
    native.build_all([str(COMPILER)])
    assert library.path.exists()
    with torchport.config.override(native=False):
        assert library.load() is None


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(
    "library",
    sorted({*native.libraries(), caller.library}, key=lambda library: library.source.name),
    ids=lambda library: library.source.name,
)
def test_a_source_compiles_without_warnings(library: native.NativeLibrary) -> None:
    """Where a build fails Python does the work, without a word: so a source that does not compile is seen here."""
    command = library.command([str(COMPILER)], Path(sysconfig.get_paths()["include"]))
    done = subprocess.run([*command, "-Werror", "-fsyntax-only"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- which function stands for which -------------------------------------------------------------------------------
def _resolved(path: str) -> object:
    """What a dotted path below ``torchport`` names: the longest module, then attributes."""
    parts = path.split(".")
    for at in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: Any = importlib.import_module(".".join(["torchport", *parts[:at]]))
            for name in parts[at:]:
                found = getattr(found, name)
            return found
    raise AssertionError(path)


def test_the_table_names_functions_that_are_there() -> None:
    pairs = table()
    assert len(pairs) >= 20
    for pair in pairs:
        assert callable(_resolved(pair.python)), pair
    swapped = {pair.cpp.removeprefix("torchport_"): pair for pair in pairs if pair.how.startswith("`twins.")}
    assert swapped.keys() == twins.in_python.keys()
    for name, pair in swapped.items():
        assert _resolved(pair.python) is twins.in_python[name]


def test_every_function_that_python_calls_is_in_the_table() -> None:
    """Less those that only begin: they are told what they need of Python, or count, or hear of regions and threads; or
    make what Python's objects are from the beginning; or compute what only C++ puts off; or do what a
    kernel in Python cannot (``torchport_same``)."""
    exported = {
        name
        for source in native.flush.source.parent.glob("*.[ch]*")
        for name in re.findall(r'extern "C" [\w ]+?\*? ?(torchport_\w+)\(', source.read_text())
    }
    assert exported - {pair.cpp for pair in table()} == {
        "torchport_composite_routed",
        "torchport_direct_anchor",
        "torchport_direct_forget",
        "torchport_direct_start",
        "torchport_flush_start",
        "torchport_follow_start",
        "torchport_followed",
        "torchport_same",
        "torchport_settle",
        "torchport_shown",
        "torchport_steps_start",
        "torchport_thread_limit",
    }


def test_the_table_in_the_documentation_is_this_one() -> None:
    page = Path(torchport.__file__).parents[1] / "docs" / "native.md"
    assert table_text() in page.read_text(encoding="utf-8")


def test_only_what_python_has_can_be_swapped() -> None:
    with pytest.raises(KeyError, match="no Python function is named other"):
        twins.use(other=len)
    before = twins.in_cpp()
    twins.use_python()
    assert twins.in_cpp() == []
    twins.use(alive=list)
    assert twins.in_cpp() == ["alive"]
    twins.use_python()
    if before:
        use_flush(native.flush.load())  # type: ignore[arg-type]
    assert twins.in_cpp() == before


@compiles
def test_functions_that_count_otherwise_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.build_all([str(COMPILER)])
    library = native.flush.load()
    assert library is not None
    for name, python in twins.in_python.items():
        monkeypatch.setattr(twins, name, python)
    monkeypatch.setitem(twins.in_python, "alive", list)
    before = [getattr(twins, name) for name in twins.in_python]
    with caplog.at_level(logging.WARNING, "torchport.native"):
        use_flush(library)
    assert [getattr(twins, name) for name in twins.in_python] == before
    assert "counts references otherwise" in caplog.text
