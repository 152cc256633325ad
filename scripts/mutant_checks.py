"""What may catch a mutant: golden records, laws and tests, and the map of the lines that each of them executes.

The map has a piece for each file of tests, in .cache/mutants. A piece is stale once its file or anything that is
mutated has changed.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scripts.mutations import ROOMS, ROOT, Mutant, sources

MAP = ROOT / ".cache" / "mutants"
LONGEST = 30.0  # seconds of the tests that a mutant meets, as measured with the map
DEFAULTS = "tests/test_house.py::test_the_reference_is_what_the_code_says"  # the page has those of all fields
NEIGHBOURS = ["tests/test_house.py", "tests/api/test_python.py", "tests/cli/test_eval.py", "tests/runtime"]  # runs
# tests/core/test_conformance.py would only repeat the laws; servers and clusters are other processes.
LEFT_OUT = ("tests/core/test_conformance.py", "tests/engine/http", "tests/engine/serve", "tests/runtime/placement")
OWN = ("proxima", "tests", "packages", "conftest", "scripts", "__")  # modules that a mutant may need anew
OF_PEERS = ROOT / "packages" / "proxima-peers" / "tests" / "golden"
Lines = dict[str, dict[str, list[int]]]  # path → lines of a statement → indices of checks


def record_files() -> list[Path]:
    """Return the files of golden records."""
    return [file for folder in (ROOT / "tests" / "golden", OF_PEERS) for file in sorted(folder.glob("*.json"))]


def golden() -> dict[str, Callable[[], bool]]:
    """Return a check for each record: whether its verdict is as expected."""
    from proxima_peers.verify.record import Record
    from proxima_peers.verify.verification import verify_record

    differs = [line.split(maxsplit=1) for line in (OF_PEERS / "differs.txt").read_text(encoding="utf-8").splitlines()]
    reasons = {name: ("differs", reason.replace("+", ", ")) for reason, name in differs}
    records = [record for file in record_files() for record in json.loads(file.read_text(encoding="utf-8"))]

    def holds(record: dict[str, Any]) -> bool:
        verdict = verify_record(record)
        asked = verdict.status, verdict.reason
        complete = set(Record.of(record).leaves) == set(verdict.compared)
        return complete and asked == reasons.get(record["name"], ("matched", None))

    return {record["name"]: lambda r=record: holds(r) for record in records}


def laws(cases: int | None = None) -> dict[str, Callable[[], bool]]:
    """Return a check for each kind: whether `proxima check` finds nothing, with `cases` on the first few cases of each
    law only."""
    from proxima import core
    from proxima.laws import law as one_law
    from proxima.laws import spec_check

    tables = {
        name: getattr(core, "PENALTIES" if name == "penalty" else f"{name.upper()}S") for name in spec_check.SLOTS
    }
    full = spec_check.check_law

    def holds(slot: str, kind: str) -> bool:
        short = lambda law, spec: full(dataclasses.replace(law, cases=lambda: islice(law.cases(), cases)), spec)  # noqa: E731
        spec_check.check_law = one_law.check_law = full if cases is None else short
        return all(result.status != "FAILED" for result in spec_check.check_spec(slot, tables[slot][kind]()))

    return {f"{slot}/{kind}": lambda s=slot, k=kind: holds(s, k) for slot, table in tables.items() for kind in table}


def run_tests(names: list[str], plugin: Any) -> int:
    """Run tests up to the first failure; returns pytest's exit code."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--rootdir", str(ROOT)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*options, "-m", "not campaign and not gpu", *names], plugins=[plugin]))


class FirstFailure:
    """A pytest plugin that remembers the first failure; a module that can't be imported is one."""

    name = ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid


# ---- the map: which checks execute a line ------------------------------------------------------------------------


SEEN: set[int] = set()  # the numbers of the statements that were executed
STATEMENTS: list[tuple[str, int, int]] = []  # by number: the file and the lines


class Tracer:
    """Records the statements of the rooms that something executes, and is a pytest plugin that does so for each test.
    What a fixture of several tests executes counts for each of them."""

    def __init__(self) -> None:
        self.checks: dict[str, float] = {}  # name → seconds
        self.lines: Lines = defaultdict(lambda: defaultdict(list))
        self.shared: dict[Any, set[int]] = defaultdict(set)
        self.failed: set[str] = set()

    def of(self, name: str, run: Callable[[], bool]) -> bool:
        """Record a check; returns whether it holds."""
        SEEN.clear()
        began = time.monotonic()
        good = run()
        self.note(name, time.monotonic() - began)
        return good

    def note(self, name: str, seconds: float) -> None:
        self.checks[name] = round(seconds, 3)
        for path, first, last in map(STATEMENTS.__getitem__, tuple(SEEN)):
            self.lines[path][f"{first} {last}"].append(len(self.checks) - 1)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        SEEN.clear()
        began = time.monotonic()
        yield
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            SEEN.update(*(self.shared.get(fixture, ()) for fixture in fixtures))
        self.note(item.nodeid, time.monotonic() - began)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = set(SEEN)
        SEEN.clear()
        yield
        if fixturedef.scope != "function":
            self.shared[fixturedef] |= SEEN
        SEEN.update(before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def test_files() -> list[str]:
    """Return the files of the tests that the map is of, those of the rooms first."""
    of_rooms = [folder for _, folders in ROOMS.values() for folder in folders]
    found = [str(file.relative_to(ROOT)) for of in (of_rooms, NEIGHBOURS) for file in _files_below(of)]
    return [file for file in found if not file.startswith(LEFT_OUT)]


def _files_below(folders: list[str]) -> list[Path]:
    places = [ROOT / folder for folder in folders]
    return sorted({file for at in places for file in ([at] if at.is_file() else at.rglob("test_*.py"))})


@cache
def stamp_of_sources() -> str:
    """Return a hash of all files that are mutated."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in sorted(sources()))).hexdigest()


def piece(of: str) -> tuple[Path, str]:
    """Return the file of a piece of the map, and the stamp that it has if nothing has changed since."""
    files = [ROOT / of] if of.endswith(".py") else record_files() if of == "golden" else []
    own = b"".join(file.read_bytes() for file in files)
    return MAP / f"{of.replace('/', '.')}.json", hashlib.sha256(own + stamp_of_sources().encode()).hexdigest()


def draw(of: str) -> str:
    """Write a piece of the map, of `golden`, `laws` or a file of tests; returns what fails on the source as it is."""
    tracer, (file, stamp) = Tracer(), piece(of)
    if of.endswith(".py"):
        run_tests([of, "--maxfail=1000"], tracer)
    else:
        checks = golden() if of == "golden" else laws(cases=3)
        tracer.failed = {name for name, run in checks.items() if not tracer.of(name, run)}
    names = list(tracer.checks)
    usable = {i for i, name in enumerate(names) if name not in tracer.failed}
    lines = {
        path: {line: own for line, checks in of_path.items() if (own := sorted(usable.intersection(checks)))}
        for path, of_path in tracer.lines.items()
    }
    MAP.mkdir(parents=True, exist_ok=True)
    modules = sorted(name for name in sys.modules if not name.startswith(OWN))
    text = json.dumps({"stamp": stamp, "checks": tracer.checks, "lines": lines, "modules": modules})
    file.with_suffix(".part").write_text(text, encoding="utf-8")
    file.with_suffix(".part").rename(file)
    return ", ".join(sorted(tracer.failed))


def drawn(of: str) -> dict[str, Any] | None:
    """Return a piece of the map; None if it is missing or stale."""
    file, stamp = piece(of)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found if found.get("stamp") == stamp else None


PIECES: dict[str, dict[str, Any]] = {}


def checks_at(of: str, mutant: Mutant) -> list[str]:
    """Return the checks of a piece that execute the mutant's statement or, outside functions, anything in its file."""
    first, last = mutant.lines if mutant.in_statement else (0, 10**6)  # a constant: whatever runs its file
    names = list(PIECES[of]["checks"])
    lines = PIECES[of]["lines"].get(mutant.path, {}).items()
    own = (checks for place, checks in lines if _overlap(place, first, last))
    return [names[i] for i in sorted({i for checks in own for i in checks})]


def _overlap(place: str, first: int, last: int) -> bool:
    begin, end = map(int, place.split())
    return begin <= last and first <= end


def tests_of(room: str, mutant: Mutant) -> list[str]:
    """Return the tests that a mutant meets: that of the page of defaults, if it is no function's; those of its room,
    the quickest first, up to LONGEST seconds; then the others of the same files, which may use what one of them has
    computed, up to half of that."""
    first = "" if mutant.in_function else DEFAULTS
    own, chosen, files = tuple(ROOMS[room][1]), [], set()
    seconds = {name: s for of in PIECES if of.endswith(".py") for name, s in PIECES[of]["checks"].items()}
    executing = {name for of in PIECES if of.endswith(".py") for name in checks_at(of, mutant)}
    executing |= seconds.keys() & {first}
    for few, limit in ((executing, LONGEST), (seconds.keys() - executing, LONGEST / 2)):
        for name in sorted(few, key=lambda name: (name != first, not name.startswith(own), seconds[name])):
            if (few is executing or name.partition("::")[0] in files) and limit > 0:
                limit -= seconds[name]
                chosen.append(name)
                files.add(name.partition("::")[0])
    return chosen
