"""Mutants of eight rooms that compute: change the source in one place, and see which check catches it.

    nice python scripts/mutants.py map [--minutes 4]
    nice python scripts/mutants.py ROOM ... [--sample 60 | --signs] [--minutes 4] [--again | --anew] [--only TEXT ...]

`map` runs the tests of all rooms once and notes which lines each executes; it runs again what a changed file makes
stale. Then a sample of each room's mutants, drawn by a seed, is run, each against what executes its statement: in
`core` the golden records and the laws of `proxima.laws`, everywhere the tests, those of its own room first and the
quickest first, up to half a minute of them. The first failure catches it. A campaign goes in pieces: `--minutes` ends
one, and the next continues it. Results are in benchmarks/results/mutants/ROOM.json; `--again` runs the missed ones
again, `--anew` the whole sample, whose mutants stay the same when their functions move to other files.

A mutant has a sign, an operator, a number, a truth value or a branch exchanged, `min` for `max` or the like, a call's
first two arguments swapped, a statement left out, or the result of a spec 1 % too large (`scripts/mutations.py`). It
runs in a forked process, where the functions of its file get its code; only a change outside functions requires
importing anew. Processes that tests start with a new interpreter don't get it: with `--by TEST ...` these tests alone
are run, in a new interpreter over a copy of the repository, and whatever they start has the change.

    nice python scripts/mutants.py training --again --only process_ranks --by tests/training/test_ranks.py
"""

import argparse
import ast
import builtins
import contextlib
import dataclasses
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import hypothesis

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.mutant_checks import (
    PIECES,
    SEEN,
    STATEMENTS,
    FirstFailure,
    checks_at,
    draw,
    drawn,
    golden,
    laws,
    run_tests,
    test_files,
    tests_of,
)
from scripts.mutations import ROOMS, ROOT, Mutant, marked, mutated, mutated_tree, sample, sources

RESULTS = ROOT / "benchmarks" / "results" / "mutants"
LIMITS = {"golden": 15, "laws": 60, "tests": 240}  # CPU seconds of a record, of a kind, of all tests; more is a hang
HANGS = ("tests", "hangs")
KINDS = 4  # the most kinds whose laws are checked for a line that many of them execute
SHARED, TOTAL = 1 << 30, 6 << 30  # bytes of a file, and of memory, that a mutant may write
STAGES = ["golden", "laws", "tests"]


class HungError(BaseException):
    """Raised when the time limit is exceeded; no handler of `Exception` catches it."""


def percent_off(result: Any) -> Any:
    """Return the result of a spec, 1 % too large."""
    for field in ("loss", "weight"):
        if hasattr(result, field):
            return dataclasses.replace(result, **{field: getattr(result, field) * 1.01})
    return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


# ---- the source, with one change ---------------------------------------------------------------------------------


def module_name(file: Path) -> str:
    """Return the name by which a file is imported."""
    parts = file.with_suffix("").parts
    inside = parts[len(parts) - 1 - parts[::-1].index("src") + 1 :]
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


class MutatedLoader(importlib.machinery.SourceFileLoader):
    """Loads the module's code with one change."""

    site = 0

    def get_code(self, fullname: str) -> CodeType:
        return mutated(Path(self.path), self.site)


class MutatedFinder:
    """Finds the mutated file's module, and no other."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, module_name(mutant.file)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        loader = MutatedLoader(name, str(self.mutant.file))
        loader.site = self.mutant.site
        return importlib.util.spec_from_file_location(name, self.mutant.file, loader=loader)


FUNCTIONS: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)


def place(code: CodeType) -> tuple[str, str, int]:
    """Return the key of the function to which this code belongs."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def exchange(code: CodeType) -> None:
    """Replace the code of a module's functions by that of another version of it."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for function in FUNCTIONS[place(inner)]:
                function.__code__ = inner
            exchange(inner)


def install(mutant: Mutant) -> None:
    """Make this process run the mutant."""
    if mutant.in_statement:  # two lambdas of a line have one place
        with contextlib.suppress(ValueError):  # a function that reads fewer variables of the one around it
            exchange(mutated(mutant.file, mutant.site))
            return
    for name in [name for name in sys.modules if name.split(".")[0] in {"proxima", "proxima_plan", "proxima_tinker"}]:
        del sys.modules[name]
    sys.meta_path.insert(0, MutatedFinder(mutant))


def import_rooms() -> None:
    """Import all that is mutated, before anything forks: a kind that is imported at first use is too late."""
    hypothesis.settings.register_profile("mutants", database=None)
    hypothesis.settings.load_profile("mutants")
    builtins.percent_off = percent_off
    for file in sorted(sources()):
        importlib.import_module(module_name(Path(file)))
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename in sources():
            FUNCTIONS[place(function.__code__)].append(function)
    gc.freeze()


# ---- a mutant ----------------------------------------------------------------------------------------------------


def first_failure(names: list[str], checks: Callable[[], dict[str, Callable[[], bool]]], limit: int) -> str | None:
    """Return the first of the named checks that fails; whatever the mutant raises, and a hang, is a failure."""
    name = "import"
    try:
        made = checks()
        for name in names:
            signal.setitimer(signal.ITIMER_PROF, limit)
            if not made[name]():
                return name
    except Exception as error:
        return f"{type(error).__name__} in {name}"
    except HungError:
        return f"{name} hangs"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def first_failing_test(names: list[str]) -> str | None:
    """Return the first of these tests that fails."""
    plugin = FirstFailure()
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMITS["tests"])
        code = run_tests(names, plugin)
    except HungError:
        return f"{plugin.name or 'a test'} hangs"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if code in (0, 5):
        return None
    return plugin.name or f"pytest ends with {code}"


def verdict(work: tuple[str, Mutant]) -> tuple[str, str]:
    """Return the stage and the check that catch a mutant of a room, or "missed" and the number of tests."""

    def hung(*_: Any) -> None:
        raise HungError

    room, mutant = work
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHARED, SHARED))
    resource.setrlimit(resource.RLIMIT_DATA, (TOTAL, TOTAL))
    signal.signal(signal.SIGPROF, hung)
    tests = tests_of(room, mutant)
    stages = {of: checks_at(of, mutant) for of in ("golden", "laws") if of in PIECES}
    try:
        install(mutant)
    except Exception as error:
        return "tests", f"{type(error).__name__} on import"
    kinds = stages.get("laws", [])
    for of, checks, names in (
        ("golden", golden, stages.get("golden", [])),
        ("laws", laws, kinds[:: -(-len(kinds) // KINDS) or 1]),
    ):
        if names and (failure := first_failure(names, checks, LIMITS[of])) is not None:
            return of, failure
    if tests and (failure := first_failing_test(tests)) is not None:
        return "tests", failure
    return "missed", f"{len(tests)} tests"


ANEW = """import sys
from scripts.mutant_checks import FirstFailure, run_tests
first = FirstFailure()
code = run_tests(sys.argv[1:], first)
print(first.name or ("" if code == 0 else f"pytest ends with {code}"))"""


def first_failure_anew(tests: list[str], mutant: Mutant | None = None) -> str | None:
    """Return the first of these tests that fails in a new interpreter over a copy of the repository."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        listed, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout.split("\0")[:-1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in names:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        if mutant is not None:
            source = ast.unparse(mutated_tree(mutant.file, mutant.site))
            off = "\nfrom scripts.mutants import percent_off\n" if "percent_off(" in source else "\n"
            Path(folder, mutant.path).write_text(source + off, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", ANEW, *tests], cwd=folder, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
    return done.stdout.strip() or (f"python ends with {done.returncode}" if done.returncode else None)


def verdict_anew(work: tuple[list[str], Mutant]) -> tuple[str, str]:
    """As `verdict`, by these tests."""
    tests, mutant = work
    failure = first_failure_anew(tests, mutant)
    return ("tests", failure) if failure is not None else ("missed", "these tests")


def alone(work: Any, argument: Any, pipe: Any) -> None:
    """Run `work` in this forked process, and send the result."""
    os.setsid()
    try:
        pipe.send(work(argument))
    finally:
        pipe.close()
        os._exit(0)


def parallel(work: Any, arguments: list[Any], workers: int, until: float, limit: float) -> Iterator[tuple[Any, Any]]:
    """Yield each argument with its result, every one from a forked process; None if the process died, HANGS if it
    was killed after `limit` seconds. No process is begun after `until`."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(arguments)), {}
    while (waiting and time.monotonic() < until) or running:
        while waiting and len(running) < workers and time.monotonic() < until:
            argument = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=alone, args=(work, argument, theirs))
            process.start()
            theirs.close()
            running[ours] = process, argument, time.monotonic() + limit
        late = [ours for ours, (_, _, end) in running.items() if time.monotonic() > end]
        for ours in [*multiprocessing.connection.wait(list(running), timeout=5), *late]:
            if ours not in running:
                continue
            process, argument, _ = running.pop(ours)
            try:
                result = HANGS if not ours.poll() else ours.recv()
            except EOFError:
                result = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what its tests have left behind
            process.join()
            yield argument, result


# ---- campaigns ---------------------------------------------------------------------------------------------------


def equivalent() -> dict[str, str]:
    """Return the mutants that compute the same, and why."""
    lines = (RESULTS / "equivalent.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("  #  ") for line in lines if line)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return what is known of the mutants of a room, or of its signs."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["mutants"] if file.exists() else []


def share_caught(count: Counter[str]) -> float:
    """Return the share of caught mutants among those that are not equivalent."""
    caught = sum(count[stage] for stage in STAGES)
    return caught / max(1, caught + count["missed"])


def write(name: str, rows: list[dict[str, Any]], seed: int) -> Counter[str]:
    """Write results, and return how many mutants each stage caught."""
    same = equivalent()
    for row in rows:
        if row["caught_by"] in ("missed", "equivalent"):
            row["caught_by"] = "equivalent" if row["mutant"] in same else "missed"
    count = Counter(row["caught_by"] for row in rows)
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: row["mutant"]))
    head = f'"seed": {seed}, "share": {share_caught(count):.4f}, "count": {json.dumps(count)}'
    (RESULTS / f"{name}.json").write_text(f'{{{head}, "mutants": [\n{lines}\n]}}\n', encoding="utf-8")
    return count


def table() -> str:
    """Return the table of all rooms."""
    lines = ["| room | mutants | caught | equivalent | missed | share |", "|---|---|---|---|---|---|"]
    total = Counter[str]()
    counts = {room: Counter(row["caught_by"] for row in rows_of(room)) for room in ROOMS if rows_of(room)}
    for name, count in [*counts.items(), ("all", total)]:
        if name != "all":
            total.update(count)
        caught = sum(count[stage] for stage in STAGES)
        cells = (name, sum(count.values()), caught, count["equivalent"], count["missed"], f"{share_caught(count):.1%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw_map(workers: int, until: float) -> None:
    """Draw what the map lacks."""
    builtins.__seen__ = SEEN.add
    for file in sorted(sources()):
        code, places = marked(Path(file), len(STATEMENTS))
        STATEMENTS.extend((str(Path(file).relative_to(ROOT)), *place) for place in places)
        exchange(code)
    missing = [of for of in ("golden", "laws", *test_files()) if drawn(of) is None]
    done = 0
    for of, failed in parallel(draw, missing, workers, until, limit=1200):
        done += 1
        if failed is None or failed:
            print(f"{of}: fails on the source as it is: {failed or 'its process died'}", flush=True)
    print(f"{done} pieces drawn, {len(missing) - done} are missing")


def campaign(room: str, chosen: argparse.Namespace, until: float) -> None:
    """Run what a room's sample lacks, and print the missed mutants and the totals."""
    name, size = (f"{room}_signs", None) if chosen.signs else (room, chosen.sample)
    recorded = [row["mutant"] for row in rows_of(name)]
    drawn_sample = sample(room, size, chosen.seed, recorded)
    mutants = {mutant.name: mutant for mutant in drawn_sample if mutant.signs or not chosen.signs}
    rows = [] if chosen.anew else [row for row in rows_of(name) if row["mutant"] in mutants]
    asked = [row for row in rows if chosen.again and row["caught_by"] == "missed"]
    asked = [row["mutant"] for row in asked if any(text in row["mutant"] for text in chosen.only)]
    rows = [row for row in rows if row["mutant"] not in asked]
    known = {row["mutant"] for row in rows}
    new = [m for m in mutants.values() if m.name not in known and any(t in m.name for t in chosen.only)]
    work: list[tuple[Any, Mutant]] = [(chosen.by or room, m) for m in new]
    of_work = verdict_anew if chosen.by else verdict
    for (_, mutant), result in parallel(of_work, work, chosen.workers, until, limit=600 if chosen.by else 300):
        stage, by = result or ("missed", "its process died")
        rows.append({"mutant": mutant.name, "line": mutant.lines[0], "caught_by": stage, "check": by})
        write(name, rows, chosen.seed)
        if stage == "missed" and mutant.name not in equivalent():
            print(f"missed  {mutant.path}:{mutant.lines[0]}  {mutant.name}  ({by})", flush=True)
    count = write(name, rows, chosen.seed)
    left = len(mutants) - len(rows)
    print(f"{name}: {len(rows)} mutants, {left} left: {dict(count)}; {share_caught(count):.1%} caught", flush=True)


def main() -> None:
    """Draw the map, or run the campaign of some rooms; then write the table of tests/README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", choices=["map", "all", *ROOMS], metavar="ROOM")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each room")
    parser.add_argument("--signs", action="store_true", help="all changes of signs in place of a sample")
    parser.add_argument("--seed", type=int, default=74)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after these")
    parser.add_argument("--again", action="store_true", help="run the missed mutants again")
    parser.add_argument(
        "--anew", action="store_true", help="run the whole sample again, wherever its functions are now"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose name has one of these in it")
    parser.add_argument("--by", nargs="+", default=[], metavar="TEST", help="tests that a new interpreter runs")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    until = time.monotonic() + 60 * chosen.minutes
    os.chdir(ROOT)
    if chosen.by:
        if failure := first_failure_anew(chosen.by):
            parser.error(f"--by: fails on the source as it is: {failure}")
    else:
        import_rooms()
    if chosen.rooms == ["map"]:
        draw_map(chosen.workers, until)
        return
    for room in ROOMS if chosen.rooms == ["all"] else chosen.rooms:
        PIECES.clear()
        pieces = [*(("golden", "laws") if room == "core" else ()), *test_files()]
        PIECES.update({of: found for of in pieces if (found := drawn(of)) is not None})
        for name in {name for of in PIECES for name in PIECES[of]["modules"]}.difference(sys.modules):
            with contextlib.suppress(Exception):  # no child imports what its tests need; without a GPU some can't be
                importlib.import_module(name)
        gc.freeze()
        campaign(room, chosen, until)
    page = ROOT / "tests" / "README.md"
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return the page with the table of all rooms."""
    before, mark, rest = page.partition("<!-- mutants -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{table()}\n{end}{after}"


if __name__ == "__main__":
    main()
