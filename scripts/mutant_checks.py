"""Which tests a mutant meets, and their first failure, from a process forked for them alone.

A mutant's file is in a copy of the repository, and so are the tests: what they import, and whatever they start, has
the change.
"""

import ast
import os
import resource
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from scripts.mutations import PACKAGES, Mutant, rooms

FILE, MEMORY = 1 << 30, 6 << 30  # bytes of a file, and of memory, that a mutant may write
HANGS = 60  # seconds of one test, after which it is interrupted; a fifth later its process is killed
# Runs from beginning to end, met by every mutant that nothing else has caught.
WHOLE = (
    "tests/api",
    "tests/recipes",
    "tests/runtime/test_run.py",
    "tests/runtime/test_episode_run.py",
    "tests/runtime/test_resumed_runs.py",
    "tests/cli/test_eval.py",
)
OWN = ("proxima", "tests", "packages", "conftest", "scripts")  # modules of the repository
COLLECTED = 600  # seconds in which all tests are collected
TOKEN = "PROXIMA_MUTANT"  # in the environment of all that a mutant's tests start


def module_of(path: str) -> str:
    """Return the name by which a file of sources is imported."""
    name = path.partition("src/")[2].removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def imported(tree: ast.Module) -> set[str]:
    """Return the full names of the modules, and of what is in them, that a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@cache
def tests_and_imports(root: Path) -> dict[str, tuple[str, set[str]]]:
    """Return each file of tests with its text and what it imports, the smallest first."""
    folders = [root / "tests", *(root / f"packages/proxima-{name}/tests" for name in PACKAGES)]
    found = {}
    for file in sorted(file for folder in folders for file in folder.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        found[str(file.relative_to(root))] = text, imported(ast.parse(text))
    return dict(sorted(found.items(), key=lambda item: len(item[1][0])))


def naming(mutant: Mutant, root: Path) -> list[str]:
    """Return the files of tests that name the mutant's module, or import from a package above what it defines."""
    module = module_of(mutant.path)
    tree = ast.parse((root / mutant.path).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    parts = module.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    wanted = {f"{package}.{name}" for package in above for name in defined}
    return [
        file
        for file, (text, imports) in tests_and_imports(root).items()
        if module in text or module in imports or not wanted.isdisjoint(imports)
    ]


def tests_of(mutant: Mutant, root: Path) -> list[list[str]]:
    """Return the files of tests that a mutant meets, in two parts.

    First those of its room that name its module, then those elsewhere that do, the other ones of its room, and a few
    whole runs.
    """
    own = rooms(root)[mutant.room][1] + "/"
    named = naming(mutant, root)
    first = [file for file in named if file.startswith(own)]
    elsewhere = [file for file in named if not file.startswith(own)]
    files = list(tests_and_imports(root))
    others = [file for file in files if file.startswith(own)]
    whole = [file for file in files if file.startswith(WHOLE)]
    second = [file for file in dict.fromkeys([*elsewhere, *others, *whole]) if file not in first]
    return [part for part in (first, second) if part]


@dataclass
class Outcome:
    """How the tests of a mutant ended.

    `failed` is the first that failed, "" if none did; `passed` is how many did not; `complete` is False if the time was
    over before the last. `hung`: the one that failed did not end by itself.
    """

    failed: str = ""
    passed: int = 0
    complete: bool = True
    hung: bool = False


class FirstFailure:
    """A pytest plugin that puts quick tests first, and notes the first failure; no test begins after the limit."""

    def __init__(self, files: list[str], limit: float, begun: Callable[[str], None]) -> None:
        self.order = {file: number for number, file in enumerate(files)}
        self.limit = limit
        self.started = time.monotonic()
        self.begun = begun  # gets the name of each test
        self.outcome = Outcome()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> tuple[bool, int]:
            return item.get_closest_marker("slow") is not None, self.order.get(item.nodeid.partition("::")[0], 0)

        items.sort(key=place)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.failed = self.outcome.failed or report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.begun(item.nodeid)
        done = yield
        if not self.outcome.failed:
            self.outcome.passed += 1
        if cpu_seconds() > self.limit or time.monotonic() - self.started > 3 * self.limit:
            self.outcome.complete = False
            item.session.shouldstop = "the time is over"
        return done

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.failed = self.outcome.failed or report.nodeid
            self.outcome.hung = self.outcome.hung or report.duration >= HANGS


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of those that it has waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


def enter(root: Path, scratch: Path) -> None:
    """Make this process one that was started in the copy, as what it starts will be."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(root)
    places = [str(root / "src"), *(str(root / f"packages/proxima-{name}/src") for name in PACKAGES), str(root)]
    old = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*places, *(place for place in sys.path if place not in old)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(places), "TMPDIR": str(scratch), "PYTEST_DEBUG_TEMPROOT": str(scratch)}
    tempfile.tempdir = None
    for name in [name for name in sys.modules if name.startswith(OWN) and name != __name__]:
        del sys.modules[name]


def run_here(plugin: FirstFailure, root: Path, scratch: Path, names: list[str], without: list[str]) -> Outcome:
    """Run tests in this process up to the first failure."""
    enter(root, scratch)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "-o", f"timeout={HANGS}"]
    options += ["--rootdir", str(root), "-m", "not campaign and not gpu"]
    options += [f"--deselect={name}" for name in without]
    code = int(pytest.main([*options, *names], plugins=[plugin]))
    if code not in (0, 2, 5) and not plugin.outcome.failed:
        plugin.outcome.failed = f"pytest ends with {code}"
    return plugin.outcome


def run_tests(root: Path, names: list[str], without: list[str], limit: float) -> Outcome | None:
    """Run tests in a forked process up to the first failure, and end what they leave behind.

    Args:
        root: the copy of the repository.
        names: files of tests, or single ones.
        without: tests that are left out.
        limit: CPU seconds after which no test begins, or three times as many by the clock.

    Returns: None if the process died.
    """
    context = get_context("fork")
    token = uuid.uuid4().hex
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=root.parent, ignore_cleanup_errors=True) as scratch:

        def work() -> None:
            os.setsid()
            os.environ[TOKEN] = token
            output = os.open(root.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                plugin = FirstFailure(names, limit, theirs.send)
                theirs.send(astuple(run_here(plugin, root, Path(scratch), names, without)))
            finally:
                os._exit(0)

        process = context.Process(target=work)
        process.start()
        theirs.close()
        try:
            return outcome_from(ours)
        except EOFError:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            end_leftovers(token)


def outcome_from(pipe: Any) -> Outcome:
    """Return the outcome that comes through a pipe after the names of the tests, as each begins; of the last test whose
    name came, if nothing comes for too long: it hangs."""
    begun: list[str] = []
    while pipe.poll(1.2 * HANGS if begun else COLLECTED):
        received = pipe.recv()
        if isinstance(received, tuple):
            return Outcome(*received)
        begun.append(received)
    return Outcome(failed=begun[-1] if begun else "collecting", passed=max(0, len(begun) - 1), hung=True)


def end_leftovers(token: str) -> None:
    """Kill the processes that have this token in their environment."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{TOKEN}={token}".encode() in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
