"""Checks what a run needs later against the checksums that were taken when it was written: `proxima check RUN`."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxima.data import UserError
from proxima.model.images.image_folder import RESTORE, image_damage, read_names
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import MOVE_AWAY, RESTORED, Journal, copied_journal
from proxima.system.damage import Checksum
from proxima.training.checkpoint import damage

FROM_JOURNAL = "a resume writes it again from run.sqlite"
FROM_COPY = "restore it from a copy; a resume needs it only after the last checkpoint, and then writes it again"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding about one kind of file.

    Args:
        kind: the file, or the folder of files.
        status: `none` where there are no such files; `not checked` where the journal can't be compared with.
        detail: how many are intact, or which are not and why.
        remedy: of a damage.
    """

    kind: str
    status: Literal["ok", "damaged", "not checked", "none"]
    detail: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, kind: str, wrong: Sequence[str], remedy: str, intact: str) -> "Finding":
        """The finding about files of which these are `wrong`; `intact` describes them if none is, empty: there are
        none."""
        if not wrong:
            return cls(kind=kind, status="ok" if intact else "none", detail=intact)
        if len(wrong) > 1:
            more = f", and {len(wrong) - 1} more"
        else:
            more = ""
        return cls(kind=kind, status="damaged", detail=f"{wrong[0]}{more}", remedy=remedy)


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
            wrong = [error.reason if isinstance(error, UserError) else str(error)]
        with Journal(":memory:") as empty:
            return list(_findings(folder, empty, wrong))
    finally:
        folder.release()


def _findings(folder: RunFolder, journal: Journal, wrong: Sequence[str] = ()) -> Iterator[Finding]:
    """`wrong`: why the journal can't be read; then `journal` is an empty one."""
    recorded = journal.checksums.read()
    yield (of_journal := _journal(folder, journal, wrong))
    yield _metrics(folder, journal if of_journal.status == "ok" else None)
    for place in (folder.rollouts, folder.evals):
        yield _several(place, recorded)
    if folder.images.exists():
        yield _images(folder.images)
    yield _checkpoints(folder.checkpoints)


def _journal(folder: RunFolder, journal: Journal, wrong: Sequence[str]) -> Finding:
    if not folder.journal.is_file():
        return Finding.of(folder.journal.name, ["is missing"], RESTORED, "")
    intact = f"{journal.step} steps, {sum(journal.counts().values())} prompts"
    return Finding.of(folder.journal.name, wrong or journal.damage(), MOVE_AWAY, intact)


def _metrics(folder: RunFolder, journal: Journal | None) -> Finding:
    """Each line against the record that the journal, if it is whole, has of it. A kill may leave a line of a step that
    is not finished, and lose that of an evaluation which the journal has."""
    kind = folder.metrics.name
    try:
        records = folder.read_metrics()
    except (UserError, UnicodeDecodeError) as error:
        if isinstance(error, UserError):
            reason = error.reason
        else:
            reason = str(error)
        return Finding.of(kind, [reason], f"delete it: {FROM_JOURNAL}", "")
    if journal is None:
        return Finding(kind=kind, status="not checked", detail=f"{len(records)} lines")
    steps = [*journal.history()][::-1]
    evaluations = journal.get("evaluations") or []
    expected = {(r["kind"], r["step"]): r for r in (*steps, *evaluations)}
    lines = {number: (r.get("kind"), r.get("step")) for number, r in enumerate(records, 1)}
    if lines and lines[len(records)] == ("train", journal.step + 1):
        records.pop()  # of a step that is not finished
    wrong = [f"line {n} differs from run.sqlite" for n, r in enumerate(records, 1) if r != expected.get(lines[n])]
    needed = {(r["kind"], r["step"]) for r in (*steps, *evaluations[:-1])}
    wrong += [f"the record of step {step} ({of}) is lost" for of, step in sorted(needed - {*lines.values()})]
    return Finding.of(kind, wrong, FROM_JOURNAL, f"{len(lines)} lines" if lines else "")


def _several(place: Path, recorded: Mapping[str, Checksum]) -> Finding:
    kind = f"{place.name}/"
    sums = {name: checksum for name, checksum in recorded.items() if name.startswith(kind)}
    wrong = [f"{name} {why}" for name, checksum in sums.items() if (why := checksum.difference(place.parent / name))]
    if sums:
        intact = f"{len(sums)} files, {sum(c.size for c in sums.values()):,} bytes"
    else:
        intact = ""
    return Finding.of(kind, wrong, FROM_COPY, intact)


def _images(place: Path) -> Finding:
    try:
        wrong = image_damage(place)
        if wrong:
            intact = ""
        else:
            intact = f"{len(read_names(place)):,} images"
    except ImportError:
        return Finding(kind="images/", status="not checked", detail="the package pillow is missing")
    return Finding.of("images/", wrong, RESTORE, intact)


def _checkpoints(place: Path) -> Finding:
    folders = sorted(path for path in place.glob("[0-9]*") if path.name.isdecimal())
    wrong = [f"{path.name}: {why}" for path in folders if (why := damage(path)) is not None]
    steps = ", ".join(str(int(path.name)) for path in folders[-5:])
    if folders:
        intact = f"{len(folders)} checkpoints, the last of steps {steps}"
    else:
        intact = ""
    return Finding.of("checkpoints/", wrong, "a resume sets it aside and uses the one before", intact)
