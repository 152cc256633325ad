"""Fixtures that every folder of tests may use."""

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: tests run in parallel, and two processes with two threads each wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Set by xdist in its workers, and by whoever starts the tests: what they print must not depend on it.
os.environ.pop("COLUMNS", None)

import pytest
from hypothesis import HealthCheck, settings

from tests.campaigns import commit, dealt, turned
from tests.skips import LEFT, Skips

# Timing says nothing about correctness, and a flaky failure is of no use to anybody.
settings.register_profile(
    "proxima", database=None, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("proxima")


gc.disable()  # modules imported during collection stay; scanning them again and again takes seconds


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="one line for all tests; see tests/progress.py")
    parser.addoption("--skips", type=Path, help="reasons for which a test may be skipped; see tests/skips.py")
    parser.addoption("--minutes", type=float, help="begin no campaign later than this; which ones, a commit decides")


def pytest_configure(config: pytest.Config) -> None:
    """Delete what tested programs leave in the temporary folder after the tests, except pytest's own folders."""
    if config.option.markexpr != "gpu":  # what the other tests say of bits, devices and ranks is said of CPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):  # a worker inherits the variables of the process that starts it
        if config.getoption("progress"):
            from tests.progress import Progress

            config.pluginmanager.register(Progress(sys.stdout))
            config.pluginmanager.register(Skips(config.getoption("skips")))
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        scratch = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="proxima-tests-")
        tempfile.tempdir = None
        isolate_home(Path(scratch))
        config.add_cleanup(lambda: shutil.rmtree(scratch, ignore_errors=True))


def isolate_home(scratch: Path) -> None:
    """Give the tests a separate home folder: the user's may be read-only, and its settings must not change a result.

    Compiled kernels stay in the user's cache if it is writable, because compiling them takes seconds.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    os.environ["XDG_CACHE_HOME"] = str(cache if os.access(place, os.W_OK) else scratch / "cache")
    os.environ["HOME"] = str(scratch / "home")
    (scratch / "home").mkdir()
    # git refuses a checkout of another user, and some tests ask it which files it tracks
    os.environ |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


SIBLINGS: dict[str, str | None] = {}  # each collected test → the small test that stands for it, where it is a campaign


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before and after pytest deselects tests by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Put the tests that wait first: xdist gives the first part of the list to one worker, which waits while the others
    compute."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    for item in items:
        campaign = item.get_closest_marker("campaign")
        SIBLINGS[item.nodeid] = campaign and campaign.args[0]
    yield
    if hasattr(config, "workerinput"):
        ordered = items if config.getoption("minutes") is None else turned(items, commit())
        items[:] = dealt(ordered, config.workerinput["workercount"])


STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where minutes are few, each commit begins with other campaigns, and leaves the last ones to the next commits."""
    limit = item.config.getoption("minutes")
    if limit is not None and item.get_closest_marker("campaign") and time.monotonic() - STARTED > 60 * limit:
        pytest.skip(f"{LEFT}: {limit:g} minutes are over")


@pytest.fixture(scope="session")
def siblings() -> dict[str, str | None]:
    return SIBLINGS


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's background jobs; Ctrl-C is tested here
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Seed the global generators, so that unseeded draws depend neither on earlier tests nor on the process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for a CUDA that is not there
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _same_dtype(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `auto` be bfloat16 in this process, whatever the processor multiplies fastest; only
    `tests/model/test_precision.py` measures."""
    precision = sys.modules.get("proxima.model.precision")
    if precision is None:
        yield
        return
    measured = precision._measured
    measured.cache_clear()
    monkeypatch.setattr(precision, "speed_ratio", lambda: 2.0)
    yield
    measured.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(kind, seed=0)`: a Hugging Face folder with random weights, read-only by agreement; see
    tests/tiny.py."""
    from tests.tiny import tiny_factory

    return tiny_factory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fork engine processes and sweep runs from a process that has imported torch; the list receives them."""
    from proxima.experiments import sweep_runner
    from proxima.process import children
    from tests.warm import forked_subprocess

    started: list[Any] = []
    for module in (children, sweep_runner):
        monkeypatch.setattr(module, "subprocess", forked_subprocess(started))
    return started


@pytest.fixture
def lent_servers() -> Iterator[None]:
    """Fork all workers of rewards and environments from servers that the tests of a process share."""
    from tests.lent_servers import lent_servers

    with lent_servers():
        yield


@pytest.fixture
def own_servers(lent_servers: None) -> Iterator[None]:
    """For a test of the servers themselves, where those of its file are lent."""
    from tests.lent_servers import USERS, ForkServer

    # not the fixture `monkeypatch`: it may have begun before `lent_servers`, and would put the lent ones back after it
    with pytest.MonkeyPatch.context() as patch:
        for user in USERS:
            patch.setattr(user, "ForkServer", ForkServer)
        yield
