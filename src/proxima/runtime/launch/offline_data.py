"""Converts rows to items, once before the run, and defines the order in which a run takes them."""

import re
from contextlib import suppress
from typing import Any

from proxima.config.sections.offline_section import OfflineConfig
from proxima.data import FieldError, OverLengthError, UserError
from proxima.runtime.watch.observer import Observer
from proxima.task.prompts import Cursor
from proxima.task.protocol import EmptyPromptError, MappedRows, Row, Rows, open_tasks
from proxima.training.offline.method import OfflineMethod

NAMED = 5  # row numbers that a note names
Skipped = dict[str, list[tuple[int, FieldError]]]  # by field and reason without numbers


class OfflineData:
    """The data of a run, read from `task` and `eval.task`.

    `items` and `held_out` are what the method has built from the rows that it can use, in their order; `rows` are those
    of the tasks, keyed by their names in messages; `samples` the held-out rows whose prompts may be completed, for
    people to look at; `cursor` is the order of the items, `examples` their number per step; with `whole_epochs` the
    last step of an epoch takes only its remaining items, otherwise also the next epoch's; `notes` are warnings about
    rows.

    Raises:
        UserError: a task can't be opened; no row of it can be used; or the config refuses a row that can't be used.
    """

    def __init__(self, config: OfflineConfig, method: OfflineMethod[Any], observer: Observer) -> None:
        self.config, self.method, self.observer, self.notes = config, method, observer, list[str]()
        tasks = {"task": config.task} | ({} if config.eval.task is None else {"eval.task": config.eval.task})
        opened = open_tasks(tasks, config.seed, may_skip=True)
        self.rows: dict[str, Rows] = {f"{name}: its rows": rows for name, rows in opened.items()}
        rows = opened["task"]
        self.items = method.joined(self._items(rows, len(rows), "task"))
        self.held_out, self.samples = list[Any](), list[Row]()
        if config.eval.task is not None:
            asked = opened["eval.task"]
            count = min(config.eval.limit or len(asked), len(asked))
            self.held_out = self._items(asked, count, "eval.task")
            for number in range(min(count, getattr(config.eval, "samples", 0))):
                with suppress(EmptyPromptError):
                    self.samples.append(asked[number])
        self.cursor = Cursor(len(self.items), config.seed, config.data.shuffle)
        self.examples, self.whole_epochs = config.train.examples_per_step, not config.train.steps

    def drawn(self, steps: int) -> list[int]:
        """The positions of the items that a run of `steps` steps takes, in ascending order."""
        if self.whole_epochs:
            return list(range(self.cursor.size))
        return sorted({self.cursor.row(uid) for uid in range(min(steps * self.examples, self.cursor.size))})

    def next(self) -> list[Any]:
        """The items of the next step."""
        left = self.cursor.size - self.cursor.drawn % self.cursor.size if self.whole_epochs else self.examples
        return [self.items[self.cursor.row(uid)] for uid in self.cursor.next(min(self.examples, left))]

    def _items(self, rows: Rows, count: int, name: str) -> list[Any]:
        """The items of the first `count` rows; `notes` receives a line about skipped rows."""
        items, skipped = list[Any](), Skipped()
        for number in range(count):
            self.observer.progress("tokenize", number, count, "rows")
            try:
                items.append(self.method.item(rows[number], number))
            except FieldError as problem:
                setting = "over_length" if isinstance(problem, OverLengthError) else "unusable"
                if getattr(self.config.data, setting) == "refuse":
                    bound = f"refuses {_place(rows, number)} of {name}: {problem.reason}"
                    remedy = problem.remedy or f"change the row, or set data.{setting}=skip"
                    raise FieldError(f"data.{setting}", "refuse", bound, remedy=remedy) from None
                kind = re.sub(r"\d+", "N", f"{problem.field} {problem.bound}")
                skipped.setdefault(kind, []).append((number, problem))
        if skipped:
            total = sum(map(len, skipped.values()))
            self.notes.append(f"{name}: {total:,} of {count:,} rows are skipped: {_skipped_reasons(skipped, rows)}")
        if not items:
            reason = f"{name}: none of its {count} rows can be used: {_skipped_reasons(skipped, rows)}"
            (_, first), *_ = max(skipped.values(), key=len, default=[(0, None)])
            raise UserError(reason, remedy=(first and first.remedy) or "map other columns, or name another data set")
        return items


def _skipped_reasons(skipped: Skipped, rows: Rows) -> str:
    """`completion is empty (pairs.jsonl:4, pairs.jsonl:18 and 4 more)`, most common first; numbers in the reason are
    the first row's."""
    parts = []
    for alike in sorted(skipped.values(), key=len, reverse=True):
        problem = alike[0][1]
        named = ", ".join(_place(rows, number) for number, _ in alike[:NAMED])
        more = f" and {len(alike) - NAMED:,} more" if len(alike) > NAMED else ""
        parts.append(f"{problem.field} {problem.bound} ({named}{more})")
    return "; ".join(parts)


def _place(rows: Rows, number: int) -> str:
    """`pairs.jsonl:4`, or `row 3` where the rows are not lines of a file."""
    if isinstance(rows, MappedRows) and rows.place is not None:
        return rows.place(rows.items[number])
    return f"row {number}"
