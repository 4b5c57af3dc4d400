"""Forked children: with every frontend an engine works, or says why it cannot, and nothing waits for lost threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchport.backend.registry import registry
from torchport.core.forks import guarded_lock, guarded_rlock
from torchport.run.jobs import JobState
from torchport.run.queue import DeviceQueue

COMMON = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torchport
torch.set_num_threads(2)  # so that OpenMP has a thread that the child does not get
engine = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).eval()
x = torch.randn(512, 256)
torch.set_grad_enabled(False)
want = model(x)
actions = {}
def close(y, wanted=want):
    assert torch.allclose(y.cpu(), wanted, atol=1e-3), "wrong"
actions["pytorch"] = lambda: close(model(x))
"""
FRONTENDS = {
    "lazy": """
import copy
torchport.use(engine)
there, px = copy.deepcopy(model).to("port"), x.to("port")
for _ in range(2):
    close(there(px))
old, pending = there(px), there(px)
torchport.sync()
in_flight = there(px)
torchport.sync(wait=False)
actions["read"] = lambda: close(old)
actions["read what was in flight"] = lambda: close(in_flight)
actions["compute"] = lambda: close(there(px))
actions["copy"] = lambda: close(torch.ones(64).to("port") * 2, torch.ones(64) * 2)
actions["index"] = lambda: close(px[3], x[3])
""",
    "compile": """
f = torch.compile(model, backend="torchport", options={"backend": engine})
close(f(x))
close(f(x))
actions["call"] = lambda: close(f(x))
actions["compile"] = lambda: close(f(x[:100].contiguous()), want[:100])
""",
    "file": """
from torchport import aot, runtime
aot.lower(model, (x,), backend=engine).save("program.pt2")
program = runtime.load("program.pt2")
method = program.load_method()
close(method(x)[0])
actions["call"] = lambda: close(method(x)[0])
actions["load a method"] = lambda: close(program.load_method()(x)[0])
actions["load"] = lambda: close(runtime.load("program.pt2").load_method()(x)[0])
actions["close"] = lambda: method.close()
""",
}
FRONTENDS["interpreted"] = f"""
torchport.config.tiers = "auto"
torchport.use(engine)
torch.ones(300).to("port").sum().item()
torchport.config.tiers = "off"  # what follows is compiled, and known when the process forks
{FRONTENDS["lazy"]}
torchport.config.tiers = "auto"
def train(device):
    with torch.enable_grad():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        losses = []
        for _ in range(40):
            loss = net(torch.ones(4, 8, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
# Backward works in a child only if the parent has had none: PyTorch's own rule.
actions["train"] = lambda: close(torch.tensor(train("port")), torch.tensor(train("cpu")))
class Rows(torch.utils.data.Dataset):
    def __init__(self): self.rows = x.to("port")
    def __len__(self): return 8
    def __getitem__(self, at): return self.rows[at] * 2
rows = Rows()
actions["data"] = lambda: close(next(iter(torch.utils.data.DataLoader(rows, 8, num_workers=2, timeout=40))), x[:8] * 2)
"""
FORKS = """
for name, action in actions.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            action()
            print(f"{name}: works")
        except RuntimeError as error:
            print(f"{name}: {error}".replace(chr(10), " "))
        sys.stdout.flush()
        os._exit(0)
    end = time.monotonic() + 60
    while not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.02)
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            print(f"{name}: HANGS")
            break
child = os.fork()
if child == 0:
    sys.exit(3)  # through Python's end and the engines' destructors
end = time.monotonic() + 60
ended, status = 0, 0
while not ended:
    time.sleep(0.02)
    ended, status = os.waitpid(child, os.WNOHANG)
    if time.monotonic() > end:
        os.kill(child, 9)
        os.waitpid(child, 0)
        print("end: HANGS")
        break
else:
    print("end: works" if os.waitstatus_to_exitcode(status) == 3 else f"end: with {os.waitstatus_to_exitcode(status)}")
sys.stdout.flush()
if actions.get("call"):
    actions["call"]()  # the parent goes on
"""
IN_WORDS = "its threads stayed in the parent"
READS = {"pytorch", "read", "read what was in flight", "close", "end"}
LOST = {"openvino", "xla"}
"""Engines with threads of their own that cannot be started again."""
QUICK = {("openvino", "file"), ("xla", "interpreted")}


@pytest.mark.parametrize(
    ("engine", "frontend"),
    [
        pytest.param(engine, frontend, marks=[] if (engine, frontend) in QUICK else pytest.mark.slow)
        for engine in ("reference", "inductor", "xla", "openvino", "executorch")
        for frontend in FRONTENDS
    ],
)
def test_a_forked_child_computes_or_says_why_not(engine: str, frontend: str, tmp_path: Path) -> None:
    if registry.get_optional(engine) is None:
        pytest.skip(f"{engine} cannot run here")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", COMMON + FRONTENDS[frontend] + FORKS, engine],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert len(said) >= 4
    for name, text in said.items():
        if engine in LOST and name not in READS and frontend != "interpreted":
            assert IN_WORDS in text, (name, text)
            assert "spawn" in text
        else:
            assert text == "works", (name, text)


# -- locks ---------------------------------------------------------------------------------------------------------
def _in_child(action: Callable[[], bool]) -> bool:
    """Whether an action in a forked child returns true, within ten seconds."""
    child = os.fork()
    if child == 0:
        os._exit(0 if action() else 1)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("make", [guarded_lock, guarded_rlock])
def test_a_child_has_no_lock_that_another_thread_holds(
    make: Callable[[], threading.Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchport.core.forks.LONGEST_WAIT", 0.1)
    lock, held, end = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert _in_child(lambda: lock.acquire(timeout=1))
    assert not lock.acquire(timeout=0.01)  # the parent's thread has it still
    end.set()
    thread.join()
    assert lock.acquire(timeout=1)
    lock.release()


def test_a_fork_waits_for_a_lock_and_gives_it_back() -> None:
    lock, held, inside = guarded_lock(), threading.Event(), []

    def hold() -> None:
        with lock:
            inside.append(1)
            held.set()
            time.sleep(0.2)
            inside.clear()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert _in_child(lambda: not inside and lock.acquire(timeout=1))
    thread.join()
    assert lock.acquire(timeout=1)
    lock.release()
    mine = guarded_rlock()
    with mine:
        assert _in_child(lambda: mine.acquire(timeout=1))
    assert not mine._is_owned()  # type: ignore[attr-defined]


def test_a_child_does_not_wait_for_a_thread_that_was_about_to_start_a_job() -> None:
    worker = DeviceQueue("queue", starts=True)
    about_to, begun = (
        SimpleNamespace(started=None, state=None),
        SimpleNamespace(started=object(), state=JobState.STARTED),
    )
    worker._started.extend([begun, about_to])  # type: ignore[list-item]
    worker.after_fork_in_child()
    assert list(worker._started) == [begun]
    assert about_to.state is JobState.HELD
