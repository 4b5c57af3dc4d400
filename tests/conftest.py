"""Options, environment and fixtures that every test shares."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or transformers: no test may reach the network, and workers must not fight for cores.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# What one run has compiled must not be what the next one tests; tests of the disk cache have folders of their own.
os.environ["TORCHPORT_CACHE"] = "off"
# Most tests are about what is compiled, and count it; those about what is interpreted say so.
os.environ.setdefault("TORCHPORT_TIERS", "off")
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_WORKER:
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background like this; tests interrupt themselves and the processes they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

with warnings.catch_warnings():
    # A device that fails to set up is reported by the tests that use it, not by refusing to collect the others.
    warnings.simplefilter("default")
    import torch

if torch.version.cuda and not torch.cuda.is_available():
    # Such a build says on standard error that it found CUDA's tools and no GPU; tests look at what is printed there.
    os.environ.setdefault("TORCH_LOGS", "-torch.utils.cpp_extension")

STARTED = pytest.StashKey[float]()

# -- slow tests: left out, or every one (--runslow), or a seeded sample and nothing else (--slow-sample N) ------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--runslow", action="store_true", help="run slow tests too")
    group.addoption("--slow-sample", type=int, metavar="N", help="run only a random sample of N slow tests")
    group.addoption(
        "--slow-seed", metavar="S", help="seed of the sample and of drawn programs; default: the commit's hash"
    )
    group.addoption(
        "--slow-budget",
        type=float,
        metavar="SECONDS",
        help="with --slow-sample: start no further test after this long (per worker)",
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


@pytest.fixture(scope="session")
def commit_seed(pytestconfig: pytest.Config) -> str:
    """What tests draw from that look at something else with every commit."""
    return pytestconfig.option.slow_seed or _commit()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()
    if config.option.slow_sample is not None and config.option.slow_seed is None:
        config.option.slow_seed = _commit()
    if IN_WORKER:
        torch.set_num_threads(1)
    if torch.__version__.startswith("2.11."):
        # That release says so of its own reading of exported programs, once in a process.
        config.addinivalue_line("filterwarnings", "ignore:The given buffer is not writable:UserWarning")


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.slow_sample is None:
        return None
    sample, seed = config.option.slow_sample, config.option.slow_seed
    return f"a sample of the slow tests only; again with: --slow-sample {sample} --slow-seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.runslow:
        return
    slow = sorted(item.nodeid for item in items if item.get_closest_marker("slow"))
    if config.option.slow_sample is None:
        keep = {item.nodeid for item in items}.difference(slow)
    else:
        # Every worker draws the same sample: the node ids are sorted and the seed is the same.
        keep = set(random.Random(config.option.slow_seed).sample(slow, min(config.option.slow_sample, len(slow))))
    dropped = [item for item in items if item.nodeid not in keep]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.nodeid in keep]


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.option.slow_budget
    if item.config.option.slow_sample is not None and budget is not None:
        spent = time.monotonic() - item.config.stash[STARTED]
        if spent > budget:
            pytest.skip(f"the sample's {budget:.0f} s were used up")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.slow_sample is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # a sample of no slow tests is an empty one, not a mistake


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Switch tiers off for tests marked as being about what is compiled."""
    if request.node.get_closest_marker("compiled") is None:
        yield
        return
    from torchport.core.config import config  # on demand: tests of PyTorch on the CPU import none of torchport

    with config.override(tiers="off"):
        yield


# -- shared fixtures (backend_name, port, …) go below this line --------------------------------------------------------
