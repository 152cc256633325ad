"""Checks every file of a run against the checksums that were taken when it was written: `proxima check RUN`."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal, copied_journal
from proxima.system.checksum import Checksum
from proxima.train.checkpoint_restore import damage

NOT_RECORDED = "written by a version of proxima that kept no checksums"
FROM_METRICS = "move run.sqlite away: a resume restores the steps up to the last checkpoint from metrics.jsonl"
FROM_JOURNAL = "a resume writes it again from run.sqlite"
FROM_COPY = "restore it from a copy; a resume needs it only after the last checkpoint, and then writes it again"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding about one kind of file.

    Args:
        kind: the file, or the folder of files.
        status: `none` where there are no such files.
        detail: how many are whole, or which are not and why.
        remedy: of a damage.
    """

    kind: str
    status: Literal["ok", "damaged", "not recorded", "none"]
    detail: str
    remedy: str = ""


def check_run_files(folder: RunFolder) -> list[Finding]:
    """A finding for each kind of file, the journal first.

    Raises:
        UserError: a process writes to the folder.
    """
    folder.lock_for_reading()
    try:
        try:
            with copied_journal(folder.journal) as journal:
                return list(_findings(folder, journal))
        except (UserError, sqlite3.DatabaseError) as error:  # no journal can be read
            detail = error.reason if isinstance(error, UserError) else str(error)
            broken = Finding(kind="run.sqlite", status="damaged", detail=detail, remedy=FROM_METRICS)
        with Journal(":memory:") as empty:
            return [broken, *list(_findings(folder, empty))[1:]]
    finally:
        folder.release()


def _findings(folder: RunFolder, journal: Journal) -> Iterator[Finding]:
    recorded = journal.checksums.read()
    yield (of_journal := _journal(folder, journal, recorded))
    yield _metrics(folder, journal if of_journal.status != "damaged" else None)
    for file in (folder.config, folder.environment, folder.summary):
        yield _single(file, recorded.get(file.name))
    for place in (folder.rollouts, folder.evals):
        yield _several(place, journal.step, recorded)
    yield _checkpoints(folder.checkpoints)


def _journal(folder: RunFolder, journal: Journal, recorded: Mapping[str, Checksum]) -> Finding:
    kind = folder.journal.name
    if not folder.journal.is_file():
        return Finding(kind=kind, status="damaged", detail="is missing", remedy=FROM_METRICS.partition(": ")[2])
    if wrong := journal.checksums.damage():
        return Finding(kind=kind, status="damaged", detail=_listed(wrong), remedy=FROM_METRICS)
    if journal.step and not any(name.endswith(f" step {journal.step}") for name in recorded):
        return Finding(kind=kind, status="not recorded", detail=NOT_RECORDED)
    return Finding(kind=kind, status="ok", detail=f"{journal.step} steps, {sum(journal.counts().values())} prompts")


def _metrics(folder: RunFolder, journal: Journal | None) -> Finding:
    """Each line against the record that the journal, if it is whole, has of it. A kill may leave a line of a step that
    is not finished, and lose that of an evaluation which the journal has."""
    kind = folder.metrics.name
    steps = {step: journal.metrics(step) for step in range(1, journal.step + 1)} if journal else {}
    evaluations = {r["step"]: r for r in journal.get("evaluations") or ()} if journal else {}
    try:
        records = folder.read_metrics()
    except (UserError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UserError) else str(error)
        return Finding(kind=kind, status="damaged", detail=reason, remedy=f"delete it: {FROM_JOURNAL}")
    if not steps and not evaluations:
        status: Any = "not recorded" if records else "none"
        return Finding(kind=kind, status=status, detail=f"{len(records)} lines, and nothing to compare them with")
    expected = {(True, step): r for step, r in steps.items()} | {(False, step): r for step, r in evaluations.items()}
    wrong, present = [], set()
    for number, r in enumerate(records, 1):
        is_step, step = r.get("kind") == "train", r.get("step")
        present.add((is_step, step))
        unfinished = is_step and step == len(steps) + 1 and number == len(records)
        if not unfinished and r != expected.get((is_step, step)):
            wrong.append(f"line {number}")
    lost = [f"the record of step {step}" for step in steps if (True, step) not in present]
    lost += [f"the evaluation after step {step}" for step in list(evaluations)[:-1] if (False, step) not in present]
    if wrong or lost:
        detail = _listed([*(f"{name} differs from run.sqlite" for name in wrong), *(f"{it} is lost" for it in lost)])
        return Finding(kind=kind, status="damaged", detail=detail, remedy=FROM_JOURNAL)
    return Finding(kind=kind, status="ok", detail=f"{len(records)} lines")


def _single(file: Path, recorded: Checksum | None) -> Finding:
    if recorded is None:
        there = file.is_file()
        return Finding(kind=file.name, status="not recorded" if there else "none", detail=NOT_RECORDED if there else "")
    remedy = f"restore it from a copy, or delete it{': a resume writes it again' if file.suffix == '.json' else ''}"
    if file.suffix == ".yaml":
        remedy = "restore it from a copy, or from the recipe: a resume by the recipe writes it again"
    if (wrong := _difference(file, recorded)) is not None:
        return Finding(kind=file.name, status="damaged", detail=wrong, remedy=remedy)
    return Finding(kind=file.name, status="ok", detail=f"{recorded.size:,} bytes")


def _several(place: Path, step: int, recorded: Mapping[str, Checksum]) -> Finding:
    sums = {name: checksum for name, checksum in recorded.items() if name.startswith(f"{place.name}/")}
    kind = f"{place.name}/"
    there = {f"{kind}{file.name}" for file in place.glob("[0-9]*.parquet")}
    finished = {name for name in there - sums.keys() if int(Path(name).name[:6]) < step}  # a kill leaves unknown ones
    wrong = [f"{name} {why}" for name, checksum in sums.items() if (why := _difference(place.parent / name, checksum))]
    if wrong:
        return Finding(kind=kind, status="damaged", detail=_listed(wrong), remedy=FROM_COPY)
    if finished:
        return Finding(kind=kind, status="not recorded", detail=f"{len(finished)} files, {NOT_RECORDED}")
    if not sums:
        return Finding(kind=kind, status="none", detail="")
    return Finding(kind=kind, status="ok", detail=f"{len(sums)} files, {sum(c.size for c in sums.values()):,} bytes")


def _checkpoints(place: Path) -> Finding:
    folders = sorted(path for path in place.glob("[0-9]*") if path.name.isdigit())
    wrong = [f"{path.name}: {why}" for path in folders if (why := damage(path)) is not None]
    if wrong:
        remedy = "a resume sets it aside and uses the one before"
        return Finding(kind="checkpoints/", status="damaged", detail=_listed(wrong), remedy=remedy)
    steps = ", ".join(str(int(path.name)) for path in folders[-5:])
    if not folders:
        return Finding(kind="checkpoints/", status="none", detail="")
    return Finding(kind="checkpoints/", status="ok", detail=f"{len(folders)} checkpoints, the last of steps {steps}")


def _difference(file: Path, recorded: Checksum) -> str | None:
    """Describe the problem with a file; None if its content is one that was recorded."""
    try:
        now = Checksum.of(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    if now.crc32 in recorded.crc32.split():
        return None
    changed = f"has {now.size:,} bytes, written were {recorded.size:,}" if now.size != recorded.size else ""
    return changed or "differs from what was written"


def _listed(parts: Iterable[str]) -> str:
    first, *more = parts
    return f"{first}, and {len(more)} more" if more else first
