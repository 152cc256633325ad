"""What an unfinished evaluation has answered so far, so that the same command goes on after a kill."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.flow import Group
from proxima.runtime.state.pending_files import read_groups, write_groups
from proxima.system.atomic_files import write_atomic
from proxima.system.damage import reading
from proxima.system.jsonl import dumps

FOLDER = "answered"  # in the folder of the evaluation, until its result is written
ASKED = "asked.json"
SECONDS = 5.0  # at most as much generation is lost


class KeptAnswers:
    """Scored groups in files of the folder `answered`, a few seconds' worth in each.

    Args:
        folder: of the evaluation.
        asked: what decides about the answers: model, questions, sampling, rewards, seed.
        overwrite: delete what is kept there.

    Raises:
        UserError: what is kept there was asked otherwise.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.folder = folder / FOLDER
        self.asked = json.loads(dumps(asked))
        self._waiting = dict[str, list[Group]]()
        self._written = 0.0
        if overwrite:
            self.close()
        elif (self.folder / ASKED).is_file():
            self._compare()

    def _compare(self) -> None:
        with reading(self.folder / ASKED):
            before = json.loads((self.folder / ASKED).read_text(encoding="utf-8"))
        changed = sorted(key for key in {*before, *self.asked} if before.get(key) != self.asked.get(key))
        if changed:
            remedy = "repeat the command that began it, start again with --overwrite, or give another folder"
            raise UserError(
                f"--out {self.folder.parent} contains an unfinished evaluation with other settings: "
                f"{', '.join(changed)}",
                remedy=remedy,
            )

    def begin(self) -> None:
        """Keep what comes."""
        self.folder.mkdir(exist_ok=True)
        for unfinished in self.folder.glob("*.part"):
            unfinished.unlink()
        write_atomic(self.folder / ASKED, dumps(self.asked, indent=2) + "\n")
        self._written = time.monotonic()

    def of(self, suite: str) -> list[Group]:
        """The groups of a suite that are kept, in the order in which they were answered."""
        files = sorted(self.folder.glob(f"{suite}.*.groups"), key=lambda file: int(file.suffixes[-2][1:]))
        groups = list[Group]()
        for file in files:
            with reading(file):
                groups += read_groups(file)
        return groups

    def add(self, suite: str, group: Group) -> None:
        """Keep a group, in a file at the latest when the next one comes after `SECONDS`."""
        self._waiting.setdefault(suite, []).append(group)
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the groups that wait."""
        for suite, groups in self._waiting.items():
            number = len(list(self.folder.glob(f"{suite}.*.groups")))
            part = self.folder / f"{suite}.{number}.part"
            write_groups(part, groups)
            os.replace(part, self.folder / f"{suite}.{number}.groups")
        self._waiting.clear()
        self._written = time.monotonic()

    def close(self) -> None:
        """Delete what is kept: the result has it."""
        shutil.rmtree(self.folder, ignore_errors=True)
