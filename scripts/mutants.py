"""Mutants of `proxima.core`: flip one sign or change one result by a percent, and see which check catches it.

    nice python scripts/mutants.py [--only TEXT ...] [--stages STAGE ...] [--workers 2]
                                   [--json-out FILE [--resume [STAGE ...]]]

A mutant differs from the source in one place: + and -, < and >, <= and >= are exchanged, a minus sign is removed, or
the result of one `return` of a spec's `__call__` is multiplied by 1.01. It is checked by the golden records, then by
the laws of `proxima.laws`, then by `tests/core`, as far as they execute the line at all; the first failure catches it.
For a line that many kinds share, the laws of four are checked. Each mutant runs in a forked process, where the
functions of the file get its code; only a change outside functions requires importing proxima anew. `--resume` keeps
the mutants that FILE lists as caught, or as caught by these stages, and runs the others; with `--stages golden laws`,
those that only a test would catch count as missed.
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
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "proxima" / "core"
RESULTS = ROOT / "benchmarks" / "results" / "mutants"
STAGES = ["golden", "laws", "tests"]
LIMITS = {"golden": 15, "laws": 60, "tests": 240}  # CPU seconds of a record, of a kind, of all tests; more is a hang
KINDS = 4  # the most kinds whose laws are checked for a line that many of them execute
FLIPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
# tests/core/test_conformance.py would only repeat the laws.
TESTS = ["tests/core", "--deselect=tests/core/test_conformance.py"]
OF_PEERS = ROOT / "packages" / "proxima-peers" / "tests" / "golden"
RECORDS = [
    record
    for folder in (ROOT / "tests" / "golden", OF_PEERS)
    for file in sorted(folder.glob("*.json"))
    for record in json.loads(file.read_text(encoding="utf-8"))
]
Covered = dict[str, dict[tuple[str, int], list[Any]]]


class HungError(BaseException):
    """Raised when the time limit is exceeded; no handler of `Exception` catches it."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Change number `site` of a file, in the statement at these lines; `name` is unique and survives other edits."""

    path: str
    site: int
    lines: tuple[int, int]
    name: str

    @property
    def in_function(self) -> bool:
        return "()" in self.name.split("  ")[0]


Edit = tuple[ast.AST, str, Callable[[], ast.AST]]


def edits(tree: ast.Module) -> Iterator[Edit]:
    """Yield every node that can be changed, its function, and a callable that changes it in place and returns it."""

    def within(node: ast.AST, scope: str) -> Iterator[Edit]:
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in FLIPPED:
            yield node, scope, lambda: change(node, op=FLIPPED[type(node.op)]())
        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                if type(op) in FLIPPED:
                    ops = [*node.ops[:i], FLIPPED[type(op)](), *node.ops[i + 1 :]]
                    yield node, scope, lambda ops=ops: change(node, ops=ops)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, scope, lambda: change(node, op=ast.UAdd())
        if isinstance(node, ast.Return) and node.value is not None and scope.endswith(".__call__()"):
            call = ast.Call(ast.Name("percent_off", ast.Load()), [node.value], [])
            yield node, scope, lambda: change(node, value=call)
        for field, value in ast.iter_fields(node):
            inner = scope
            if field == "body" and isinstance(node, (ast.FunctionDef, ast.Lambda)):
                inner = f"{scope}.{getattr(node, 'name', 'lambda')}()"
            elif field == "body" and isinstance(node, ast.ClassDef):
                inner = f"{scope}.{node.name}"
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from within(child, inner)

    def change(node: ast.AST, **fields: Any) -> ast.AST:
        for name, value in fields.items():
            setattr(node, name, value)
        return node

    return within(tree, "")


def mutated(file: Path, site: int) -> CodeType:
    """Return the code of a module with one change."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    next(islice(edits(tree), site, None))[2]()
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree, path = ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(CORE))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    seen: Counter[str] = Counter()
    for site in range(sum(1 for _ in edits(tree))):
        node, scope, apply = next(islice(edits(ast.parse(file.read_text(encoding="utf-8"))), site, None))
        inside = [s for s in statements if s.lineno <= node.lineno <= s.end_lineno]
        lines = (inside[0].lineno, inside[0].end_lineno) if inside else (node.lineno, node.end_lineno)
        name = f"{path}{scope}  {ast.unparse(node)}  ->  {ast.unparse(apply())}"
        seen[name] += 1
        yield Mutant(path, site, lines, f"{name}  ({seen[name]})" if seen[name] > 1 else name)


def percent_off(result: Any) -> Any:
    """Return the result of a spec, 1 % too large."""
    for field in ("loss", "weight"):
        if hasattr(result, field):
            return dataclasses.replace(result, **{field: getattr(result, field) * 1.01})
    return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


class MutatedLoader(importlib.machinery.SourceFileLoader):
    """Loads the module's code with one change."""

    site = 0

    def get_code(self, fullname: str) -> CodeType:
        return mutated(Path(self.path), self.site)


class MutatedFinder:
    """Finds the mutated file's module, and no other."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.file = mutant, CORE / mutant.path
        parts = [*self.file.relative_to(ROOT / "src").with_suffix("").parts]
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        loader = MutatedLoader(name, str(self.file))
        loader.site = self.mutant.site
        return importlib.util.spec_from_file_location(name, self.file, loader=loader)


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
    if mutant.in_function:
        exchange(mutated(CORE / mutant.path, mutant.site))
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "proxima"]:
        del sys.modules[name]
    sys.meta_path.insert(0, MutatedFinder(mutant))


def golden() -> dict[str, Callable[[], bool]]:
    """Return a check for each record: whether its verdict is as expected."""
    from proxima_peers.verify.record import Record
    from proxima_peers.verify.verification import verify_record

    differs = [line.split(maxsplit=1) for line in (OF_PEERS / "differs.txt").read_text(encoding="utf-8").splitlines()]
    reasons = {name: ("differs", reason.replace("+", ", ")) for reason, name in differs}

    def holds(record: dict[str, Any]) -> bool:
        verdict = verify_record(record)
        asked = verdict.status, verdict.reason
        complete = set(Record.of(record).leaves) == set(verdict.compared)
        return complete and asked == reasons.get(record["name"], ("matched", None))

    return {record["name"]: lambda r=record: holds(r) for record in RECORDS}


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


def tests_pass(names: list[str], plugins: tuple[Any, ...] = ()) -> bool:
    """Return True if these tests pass; a module that can't be imported is a failure."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--rootdir", str(ROOT)]
        code = pytest.main([*options, *names], plugins=list(plugins))
    if code not in (0, 1, 2):  # nothing was run
        raise RuntimeError(out.getvalue())
    return code == 0


class Lines:
    """Records the lines of core that something executes."""

    def __init__(self) -> None:
        self.found: Covered = defaultdict(lambda: defaultdict(list))
        self.seen: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(CORE)):
            return None
        self.seen.add((frame.f_code.co_filename[len(str(CORE)) + 1 :], frame.f_lineno))
        return self.trace

    def of(self, stage: str, name: str, run: Callable[[], Any]) -> Any:
        self.seen = set()
        sys.settrace(self.trace)
        try:
            return run()
        finally:
            sys.settrace(None)
            for line in self.seen:
                self.found[stage][line].append(name)


class TraceTests:
    """A pytest plugin that records the lines of each test."""

    def __init__(self, lines: Lines) -> None:
        import pytest

        self.lines = lines
        type(self).pytest_runtest_protocol = pytest.hookimpl(hookwrapper=True)(type(self).pytest_runtest_protocol)

    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.lines.seen = set()
        sys.settrace(self.lines.trace)
        yield
        sys.settrace(None)
        for line in self.lines.seen:
            self.lines.found["tests"][line].append(item.nodeid)


def coverage(stage: str) -> dict[tuple[str, int], list[Any]] | None:
    """Return, for each line of core, the names of a stage's checks that execute it; None unless all of them pass."""
    lines = Lines()
    if stage == "tests":
        good = tests_pass(TESTS, (TraceTests(lines),))
    else:
        checks = golden() if stage == "golden" else laws(cases=3)
        good = all(lines.of(stage, name, run) for name, run in checks.items())
    return dict(lines.found[stage]) if good else None


def first_failure(checks: Callable[[], dict[str, Callable[[], bool]]], names: list[str], limit: int) -> str | None:
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


def verdict(mutant: Mutant) -> tuple[str, str]:
    """Return the stage and the check that catch a mutant, or "missed"."""

    def hung(*_: Any) -> None:
        raise HungError

    signal.signal(signal.SIGPROF, hung)
    install(mutant)
    kinds, tests = names_at("laws", mutant), names_at("tests", mutant)
    stages = {
        "golden": (golden, names_at("golden", mutant)),
        "laws": (laws, kinds[:: -(-len(kinds) // KINDS) or 1]),
        "tests": (lambda: {"tests": lambda: tests_pass(tests)}, ["tests"][: len(tests)]),
    }
    for stage, (checks, names) in stages.items():
        if (failure := first_failure(checks, names, LIMITS[stage])) is not None:
            return stage, f"one of {len(tests)}" if failure == "tests" else failure
    return "missed", ""


COVERED: Covered = {}


def names_at(stage: str, mutant: Mutant) -> list[str]:
    """Return the checks that execute the mutant's statement or, outside functions, anything in its file."""
    first, last = mutant.lines if mutant.in_function else (0, 10**6)  # a constant: whatever runs its file
    places = COVERED.get(stage, {}).items()
    at_place = [names for (path, line), names in places if path == mutant.path and first <= line <= last]
    return list(dict.fromkeys(name for names in at_place for name in names))


def alone(work: Any, argument: Any, pipe: Any) -> None:
    """Run `work` in this forked process, and send the result."""
    try:
        pipe.send(work(argument))
    finally:
        pipe.close()
        os._exit(0)


def parallel(work: Any, arguments: list[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield each argument with its result, every one from a forked process; None if the process died."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(arguments)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            argument = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=alone, args=(work, argument, theirs))
            process.start()
            theirs.close()
            running[ours] = process, argument
        for ours in multiprocessing.connection.wait(list(running)):
            process, argument = running.pop(ours)
            try:
                result = ours.recv()
            except EOFError:
                result = None
            process.join()
            yield argument, result


def equivalent() -> dict[str, str]:
    """Return the mutants that compute the same, and why."""
    lines = (RESULTS / "equivalent.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("  #  ") for line in lines if line)


def main() -> None:
    """Run the campaign, and print the missed mutants and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose name has one of these in it")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="what may catch a mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--resume", nargs="*", choices=STAGES, help="keep what FILE says these caught; none: any")
    chosen = parser.parse_args()
    from hypothesis import settings

    import proxima_peers.verify.verification  # noqa: F401  torch comes with it: no child imports it again

    settings.register_profile("mutants", database=None)
    settings.load_profile("mutants")
    builtins.percent_off = percent_off
    for file in CORE.rglob("[!_]*.py"):  # kinds are imported at first use: too late to get a mutant's code
        importlib.import_module(f"proxima.{'.'.join(file.relative_to(CORE.parent).with_suffix('').parts)}")
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(str(CORE)):
            FUNCTIONS[place(function.__code__)].append(function)
    mutants = [m for file in sorted(CORE.rglob("*.py")) for m in mutants_of(file)]
    rows = []
    if chosen.resume is not None:
        names = {m.name for m in mutants}
        finished = json.loads(chosen.json_out.read_text(encoding="utf-8"))["mutants"]
        rows = [row for row in finished if row["caught_by"] in (chosen.resume or STAGES) and row["mutant"] in names]
    done = {row["mutant"] for row in rows}
    mutants = [m for m in mutants if m.name not in done and any(text in m.name for text in chosen.only)]
    for stage, lines in parallel(coverage, chosen.stages, chosen.workers):
        if lines is None:
            raise SystemExit(f"error: {stage}: fails on the source as it is")
        COVERED[stage] = lines
    for mutant, result in parallel(verdict, mutants, chosen.workers):
        stage, by = result or ("missed", "its process died")
        rows.append({"mutant": mutant.name, "line": mutant.lines[0], "caught_by": stage, "check": by})
        if stage == "missed":
            print(f"missed  :{mutant.lines[0]}  {mutant.name}", flush=True)
        if len(rows) % 20 == 0:
            report(rows, chosen.json_out)
    report(rows, chosen.json_out)


def report(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the totals, and write all rows to a file."""
    same = equivalent()
    for row in rows:
        if row["caught_by"] == "missed" and row["mutant"] in same:
            row["caught_by"] = "equivalent"
    count = Counter(row["caught_by"] for row in rows)
    caught = count["golden"] + count["laws"] + count["tests"]
    share = caught / max(1, caught + count["missed"])
    print(f"{len(rows)} mutants: {dict(count)}; {share:.1%} of those that are not equivalent are caught")
    if file is not None:
        rows.sort(key=lambda row: row["mutant"])
        lines = ",\n".join(json.dumps(row) for row in rows)
        file.write_text(
            f'{{"share": {share:.4f}, "count": {json.dumps(count)}, "mutants": [\n{lines}\n]}}\n', encoding="utf-8"
        )


if __name__ == "__main__":
    main()
