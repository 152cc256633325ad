"""Change the source in one place, in any room, and see whether a test notices: a new sample each time.

    python scripts/mutants.py draw                         # a new sample, of a seed from the clock; prints the seed
    nice python scripts/mutants.py run SEED --minutes 30   # its tests; again until nothing is left
    nice python scripts/mutants.py run SEED --again        # those not caught, against the files as they are now
    python scripts/mutants.py table                        # writes the tables of tests/README.md

A mutant has a sign, an operator, a number, a truth value or a branch exchanged, `min` for `max` or the like, a call's
first two arguments swapped, a statement left out, or the result of a spec 1 % too large (`scripts/mutations.py`).
`scripts/mutant_checks.py` says which tests it meets. A test that fails with the mutant, and passes without it, catches
it.

benchmarks/results/mutants/SEED.json has each mutant with `first`, what happened when its sample was first run, at the
commit at which it was drawn, and with `now`, what happened after tests were written. `first` is never written again.
"""

import argparse
import importlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from proxima.evaluation.intervals import wilson
from scripts.mutant_checks import run_tests, tests_of
from scripts.mutations import ROOT, Mutant, mutants_of, mutated_source, sample

RESULTS = ROOT / "benchmarks" / "results" / "mutants"
MISSED, UNDECIDED, GONE = "missed", "undecided", "gone"
STRICT = ("core", "data", "rollout", "runtime", "training")  # rooms of the higher goal
# What the tests import of others, imported once, before processes are forked.
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "pyarrow.parquet",
    "hypothesis",
    "pydantic",
    "yaml",
    "httpx",
    "aiohttp",
    "peft",
    "safetensors.torch",
    "tokenizers",
    "datasets",
    "scipy.stats",
    "uvicorn",
    "fastapi",
    "openai",
)


# ---- files -------------------------------------------------------------------------------------------------------


def results(seed: int) -> Path:
    """Return the file of a sample."""
    return RESULTS / f"{seed}.json"


def read(seed: int) -> dict[str, Any]:
    """Return a sample and what is known of it."""
    found: dict[str, Any] = json.loads(results(seed).read_text(encoding="utf-8"))
    return found


def write(found: dict[str, Any]) -> None:
    """Write a sample, a line for each mutant."""
    head = {key: value for key, value in found.items() if key != "mutants"}
    lines = ",\n".join(json.dumps(row) for row in found["mutants"])
    text = f'{json.dumps(head)[:-1]}, "mutants": [\n{lines}\n]}}\n'
    part = results(found["seed"]).with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(results(found["seed"]))


def equivalent() -> dict[str, str]:
    """Return the mutants that compute the same, and why."""
    lines = (RESULTS / "equivalent.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("  #  ") for line in lines if line)


def git(*words: str) -> bytes:
    """Return what a command of git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


@contextmanager
def copy_of(commit: str | None) -> Iterator[Path]:
    """Make a copy of the repository's files, as they are now or at a commit."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve() / "repository"
        root.mkdir()
        if commit is not None:
            with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as files:
                files.extractall(root, filter="tar")
        else:
            names = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").decode().split("\0")
            for name in filter(None, names):
                if (ROOT / name).is_file():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, root / name)
        yield root


@contextmanager
def changed(root: Path, mutant: Mutant) -> Iterator[None]:
    """Let the copy have a mutant."""
    file = root / mutant.path
    compiled = Path(importlib.util.cache_from_source(str(file)))
    text = file.read_text(encoding="utf-8")
    # Compiled code is recognised by its file's second and size, which a mutant may share.
    compiled.unlink(missing_ok=True)
    file.write_text(mutated_source(text, mutant.site, specs=mutant.room == "core"), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")
        compiled.unlink(missing_ok=True)


# ---- a sample ----------------------------------------------------------------------------------------------------


def draw(seed: int, each: int) -> None:
    """Write a new sample."""
    if results(seed).exists():
        raise SystemExit(f"error: {results(seed)} exists; leave --seed out for a new one")
    mutants = [
        {"room": m.room, "mutant": m.name, "place": f"{m.path}:{m.line}", "first": None} for m in sample(seed, each)
    ]
    commit = git("rev-parse", "HEAD").decode().strip()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    write({"seed": seed, "each": each, "date": date, "commit": commit, "mutants": mutants})
    print(f"{seed}: {len(mutants)} mutants")


def outcome(root: Path, mutant: Mutant, limit: float, unfit: list[str], by: list[str]) -> dict[str, Any]:
    """Run the tests of a mutant; returns the one that catches it, or how many passed.

    Args:
        limit: CPU seconds of each of the two parts, after which no test begins; what is not caught then is not decided.
        unfit: tests that fail without the mutant too; those that are found are added.
        by: the only tests that run; they decide nothing if they pass.
    """
    passed, complete = 0, True
    left_out = list(unfit)
    for names in [by] if by else tests_of(mutant, root):
        while True:
            with changed(root, mutant):
                found = run_tests(root, names, left_out, limit)
                if found is None:
                    return {"by": f"{UNDECIDED}: its process died", "passed": passed}
                if not found.failed:
                    break
                fails = found.hung or failing(root, found.failed, limit)
            if fails and not failing(root, found.failed, limit):
                return {"by": found.failed, "passed": passed + found.passed}
            function = found.failed.partition("[")[0]  # with all its cases, of which many may be like it
            if function in left_out:
                return {"by": f"{UNDECIDED}: {function} can't be left out", "passed": passed}
            left_out.append(function)
            if fails:
                unfit.append(function)
        passed += found.passed
        complete = complete and found.complete
    if by:
        return {"by": f"{UNDECIDED}: the tests that were named pass", "passed": passed}
    return {"by": MISSED if complete else f"{UNDECIDED}: the time was over", "passed": passed}


def failing(root: Path, test: str, limit: float) -> bool:
    """Return whether a test fails when it is run again."""
    found = run_tests(root, [test], [], limit)
    return found is None or bool(found.failed)


def run(seed: int, minutes: float, again: bool, only: list[str], limit: float, by: list[str]) -> None:
    """Run what is not decided of a sample, or again what was not caught."""
    found = read(seed)
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    until = time.monotonic() + 60 * minutes
    unfit: list[str] = []
    field = "now" if again else "first"
    asked = [row for row in found["mutants"] if is_asked(row, again) and any(text in row["mutant"] for text in only)]
    asked.sort(key=lambda row: row["first"] is not None)  # what has not run at all comes first
    with copy_of(None if again else found["commit"]) as root:
        mutants = {mutant.name: mutant for room in {row["room"] for row in asked} for mutant in mutants_of(room, root)}
        for row in asked:
            if time.monotonic() > until:
                break
            mutant = mutants.get(row["mutant"])
            row[field] = {"by": GONE, "passed": 0}
            if mutant is not None:
                row[field] = outcome(root, mutant, limit, unfit, by)
            write(found)
            print(f"{row[field]['by']}  {row['place']}  {row['mutant']}  ({row[field]['passed']} passed)", flush=True)
    left = sum(is_asked(row, again=False) for row in found["mutants"])
    print(f"{seed}: {left} are not decided; fail without a mutant: {unfit}", flush=True)


def is_asked(row: dict[str, Any], again: bool) -> bool:
    """Return whether a mutant is to run: one that is not decided, or again one that was not caught."""
    first = row["first"]
    if again:
        return first is not None and first["by"].startswith((MISSED, UNDECIDED)) and row["mutant"] not in equivalent()
    return first is None or first["by"].startswith(UNDECIDED)


# ---- tables ------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """Mutants of some rooms that have run: how many compute the same, are caught, are missed, and are not decided."""

    same: int = 0
    caught: int = 0
    missed: int = 0
    undecided: int = 0

    def cells(self) -> list[str]:
        """Return the cells of a row, with the share of the caught ones and its 95 % interval.

        What is not decided counts as not caught: it takes longer to say that all tests pass than that one fails.
        """
        counts = [str(number) for number in (self.caught, self.missed, self.undecided)]
        differing = self.caught + self.missed + self.undecided
        if not differing:
            return [*counts, "", ""]
        low, high = wilson(self.caught, differing)
        share = f"{100 * self.caught / differing:.0f} %"
        return [*counts, share, f"{100 * low:.0f} to {100 * high:.0f} %"]


def count_of(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> Count:
    """Count mutants by the last of these fields that each has."""
    same = equivalent()
    count = Count()
    for row in rows:
        by = next((row[field]["by"] for field in reversed(fields) if row.get(field)), GONE)
        if row["mutant"] in same:
            count.same += 1
        elif by == MISSED:
            count.missed += 1
        elif by.startswith(UNDECIDED):
            count.undecided += 1
        elif by != GONE:
            count.caught += 1
    return count


def line(cells: list[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    """Return a table of all samples, and one of the rooms in the newest."""
    samples = sorted((read(int(file.stem)) for file in RESULTS.glob("[0-9]*.json")), key=lambda found: found["seed"])
    counted = ["caught", "missed", "not decided", "share", "95 % interval"]
    heads = ["sample", "drawn", "mutants", "the same", *counted, "caught now"]
    lines = [line(heads), line(["---"] * len(heads))]
    for found in samples:
        rows = found["mutants"]
        first, now = count_of(rows, ("first",)), count_of(rows, ("first", "now"))
        cells = [str(found["seed"]), found["date"], str(len(rows)), str(first.same), *first.cells()]
        lines.append(line([*cells, f"{now.caught} of {now.caught + now.missed + now.undecided}"]))
    rows = samples[-1]["mutants"]
    heads = [f"room, in {samples[-1]['seed']}", *counted]
    lines += ["", line(heads), line(["---"] * len(heads))]
    groups = {room: [row for row in rows if row["room"] == room] for room in sorted({row["room"] for row in rows})}
    groups[f"{', '.join(STRICT)}: goal 95 %"] = [row for row in rows if row["room"] in STRICT]
    groups["the others: goal 90 %"] = [row for row in rows if row["room"] not in STRICT]
    groups["all"] = rows
    lines += [line([name, *count_of(of, ("first",)).cells()]) for name, of in groups.items()]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with the tables of today's results."""
    before, mark, rest = page.partition("<!-- mutants -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{tables()}\n{end}{after}"


def main() -> None:
    """Draw a sample, run it, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = parser.add_subparsers(dest="task", required=True)
    drawing = tasks.add_parser("draw", help="write a new sample")
    drawing.add_argument("--each", type=int, default=2, help="mutants of each room; large ones have more")
    drawing.add_argument("--seed", type=int, default=int(time.time()), help="from the clock")
    running = tasks.add_parser("run", help="run the tests of a sample")
    running.add_argument("seed", type=int)
    running.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after these")
    running.add_argument("--again", action="store_true", help="those not caught, against the files as they are now")
    running.add_argument("--only", nargs="+", default=[""], help="mutants whose name has one of these in it")
    running.add_argument("--limit", type=float, default=60, help="CPU seconds of each of a mutant's two parts")
    running.add_argument("--by", nargs="+", default=[], metavar="TEST", help="run these tests alone")
    tasks.add_parser("table", help="write the tables of tests/README.md")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    if chosen.task == "draw":
        draw(chosen.seed, chosen.each)
    elif chosen.task == "run":
        run(chosen.seed, chosen.minutes, chosen.again, chosen.only, chosen.limit, chosen.by)
    else:
        page = ROOT / "tests" / "README.md"
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
