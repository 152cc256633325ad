"""Converts rows to items, once before the run, and defines the order in which a run takes them."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from proxima.config.sections.offline_section import OfflineConfig, OfflineDataConfig
from proxima.data import FieldError, OverLengthError, UserError
from proxima.runtime.watch.observer import Observer
from proxima.task.cursor import Cursor
from proxima.task.protocol import EmptyPromptError, MappedRows, Row, Rows, open_tasks
from proxima.train.offline.method import OfflineMethod

NAMED = 5  # row numbers that a note names
Skipped = dict[str, list[tuple[int, FieldError]]]  # by field and reason without numbers


@dataclass(kw_only=True)
class OfflineData:
    """The data of a run; the method has built `items` and `held_out` from the rows that it can use, in their order."""

    items: list[Any]
    held_out: list[Any]
    rows: dict[str, Rows]  # of `task` and, if set, of `eval.task`, keyed by their names in messages
    samples: list[Row]  # held-out rows whose prompts may be completed, for people to look at
    cursor: Cursor  # the order of the items
    examples: int  # items per step
    whole_epochs: bool  # the last step of an epoch takes only its remaining items; otherwise also the next epoch's
    notes: list[str] = field(default_factory=list)  # warnings about rows

    def drawn(self, steps: int) -> list[int]:
        """The positions of the items that a run of `steps` steps takes, in ascending order."""
        if self.whole_epochs:
            return list(range(self.cursor.size))
        return sorted({self.cursor.row(uid) for uid in range(min(steps * self.examples, self.cursor.size))})

    def next(self) -> list[Any]:
        """The items of the next step."""
        left = self.cursor.size - self.cursor.drawn % self.cursor.size if self.whole_epochs else self.examples
        return [self.items[self.cursor.row(uid)] for uid in self.cursor.next(min(self.examples, left))]


def load_offline_data(config: OfflineConfig, method: OfflineMethod[Any], observer: Observer) -> OfflineData:
    """Read and convert the rows of `task` and `eval.task`.

    Raises:
        UserError: a task can't be opened; no row of it can be used; or the config refuses a row that can't be used.
    """
    notes: list[str] = []
    tasks = {"task": config.task} | ({} if config.eval.task is None else {"eval.task": config.eval.task})
    opened = open_tasks(tasks, config.seed, may_skip=True)
    rows = opened["task"]
    items = method.joined(_items(config.data, method, rows, len(rows), "task", notes, observer))
    held_out, named, samples = list[Any](), {"task: its rows": rows}, list[Row]()
    if config.eval.task is not None:
        asked = opened["eval.task"]
        count = min(config.eval.limit or len(asked), len(asked))
        held_out = _items(config.data, method, asked, count, "eval.task", notes, observer)
        named["eval.task: its rows"] = asked
        for number in range(min(count, getattr(config.eval, "samples", 0))):
            with suppress(EmptyPromptError):
                samples.append(asked[number])
    cursor = Cursor(len(items), config.seed, config.data.shuffle)
    return OfflineData(
        items=items,
        held_out=held_out,
        rows=named,
        samples=samples,
        cursor=cursor,
        examples=config.train.examples_per_step,
        whole_epochs=not config.train.steps,
        notes=notes,
    )


def _items(
    data: OfflineDataConfig,
    method: OfflineMethod[Any],
    rows: Rows,
    count: int,
    name: str,
    notes: list[str],
    observer: Observer,
) -> list[Any]:
    """The items of the first `count` rows; `notes` receives a line about skipped rows."""
    items, skipped = list[Any](), Skipped()
    for number in range(count):
        observer.progress("tokenize", number, count, "rows")
        try:
            items.append(method.item(rows[number], number))
        except FieldError as problem:
            setting = "over_length" if isinstance(problem, OverLengthError) else "unusable"
            if getattr(data, setting) == "refuse":
                bound = f"refuses {_place(rows, number)} of {name}: {problem.reason}"
                remedy = problem.remedy or f"change the row, or set data.{setting}=skip"
                raise FieldError(f"data.{setting}", "refuse", bound, remedy=remedy) from None
            skipped.setdefault(re.sub(r"\d+", "N", f"{problem.field} {problem.bound}"), []).append((number, problem))
    if skipped:
        total = sum(map(len, skipped.values()))
        notes.append(f"{name}: {total:,} of {count:,} rows are skipped: {_skipped_reasons(skipped, rows)}")
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
