"""Checks what a run needs later against the checksums that were taken when it was written: `proxima check RUN`."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
        if not wrong and not intact:
            return cls(kind=kind, status="none")
        if not wrong:
            return cls(kind=kind, status="ok", detail=intact)
        detail = wrong[0]
        if len(wrong) > 1:
            detail = f"{detail}, and {len(wrong) - 1} more"
        return cls(kind=kind, status="damaged", detail=detail, remedy=remedy)


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
            wrong = _reason(error)
        with Journal(":memory:") as empty:
            return list(_findings(folder, empty, [wrong]))
    finally:
        folder.release()


def _findings(folder: RunFolder, journal: Journal, wrong: Sequence[str] = ()) -> Iterator[Finding]:
    """`wrong`: why the journal can't be read; then `journal` is an empty one."""
    recorded = journal.checksums.read()
    of_journal = _journal(folder, journal, wrong)
    yield of_journal
    if of_journal.status == "ok":
        yield _metrics(folder, journal)
    else:
        yield _metrics(folder, None)
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
        return Finding.of(kind, [_reason(error)], f"delete it: {FROM_JOURNAL}", "")
    if journal is None:
        return Finding(kind=kind, status="not checked", detail=f"{len(records)} lines")
    intact = f"{len(records)} lines" if records else ""
    if records and _kind_and_step(records[-1]) == ("train", journal.step + 1):
        records.pop()  # of a step that is not finished
    steps = list(journal.history())
    evaluations = journal.get("evaluations") or []
    expected = {_kind_and_step(record): record for record in (*steps, *evaluations)}
    wrong = []
    for number, record in enumerate(records, 1):
        if record != expected.get(_kind_and_step(record)):
            wrong.append(f"line {number} differs from run.sqlite")
    needed = {_kind_and_step(record) for record in (*steps, *evaluations[:-1])}
    found = {_kind_and_step(record) for record in records}
    for of, step in sorted(needed - found):
        wrong.append(f"the record of step {step} ({of}) is lost")
    return Finding.of(kind, wrong, FROM_JOURNAL, intact)


def _kind_and_step(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record.get("kind"), record.get("step")


def _reason(error: Exception) -> str:
    """Why a file can't be read, without a remedy."""
    return error.reason if isinstance(error, UserError) else str(error)


def _several(place: Path, recorded: Mapping[str, Checksum]) -> Finding:
    kind = f"{place.name}/"
    sums = {name: checksum for name, checksum in recorded.items() if name.startswith(kind)}
    wrong = []
    for name, checksum in sums.items():
        why = checksum.difference(place.parent / name)
        if why:
            wrong.append(f"{name} {why}")
    intact = ""
    if sums:
        size = sum(checksum.size for checksum in sums.values())
        intact = f"{len(sums)} files, {size:,} bytes"
    return Finding.of(kind, wrong, FROM_COPY, intact)


def _images(place: Path) -> Finding:
    try:
        wrong = image_damage(place)
        intact = ""
        if not wrong:
            intact = f"{len(read_names(place)):,} images"
    except ImportError:
        return Finding(kind="images/", status="not checked", detail="the package pillow is missing")
    return Finding.of("images/", wrong, RESTORE, intact)


def _checkpoints(place: Path) -> Finding:
    folders = sorted(path for path in place.glob("[0-9]*") if path.name.isdecimal())
    wrong = []
    for path in folders:
        why = damage(path)
        if why is not None:
            wrong.append(f"{path.name}: {why}")
    intact = ""
    if folders:
        steps = ", ".join(str(int(path.name)) for path in folders[-5:])
        intact = f"{len(folders)} checkpoints, the last of steps {steps}"
    return Finding.of("checkpoints/", wrong, "a resume sets it aside and uses the one before", intact)
