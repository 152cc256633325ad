"""The loop of training on a fixed data set. `OfflineLoop.train`, read from top to bottom, is the method.

rows → items → order → update → held-out items → checkpoint
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from proxima.config.sections.data import limits_of
from proxima.config.sections.offline import OfflineConfig, SampledEvalConfig
from proxima.data import FieldError, OverLengthError, UserError
from proxima.data.errors import counted
from proxima.data.flow import Group, Prompt, Score
from proxima.engine.local.local_engine import Local, collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.precision import Decided
from proxima.runtime.loop.device_figures import device_figures, memory_figures, per_second
from proxima.runtime.loop.step_review import mean_metrics
from proxima.runtime.loop.training_loop import RunServices, TrainingLoop
from proxima.runtime.watch.observer import Observer
from proxima.task.opening import open_tasks
from proxima.task.overlaps import overlap_notes
from proxima.task.prompts import Cursor
from proxima.task.protocol import EmptyPromptError, Row, Rows, row_place
from proxima.training.checkpoint import read_checkpoint
from proxima.training.offline.method import MEASURED_AT_ONCE, OfflineMethod, Progress
from proxima.training.stack import TrainStack, UpdateResult

NAMED = 5  # row numbers that a note names
Skipped = dict[str, list[tuple[int, FieldError]]]  # by field and reason without numbers


class OfflineData:
    """The data of a run, read from `task` and `eval.task`. Rows become items once, before the run.

    `items` and `held_out` are the method's items of all usable rows, in order; `rows` are those of the tasks, keyed by
    their names in messages; `samples` are the held-out rows whose prompts are completed for people to read; `cursor` is
    the order of the items, `examples` their number per step. With `whole_epochs`, the last step of an epoch takes only
    the remaining items; otherwise it continues with the next epoch. `notes` are warnings about rows.

    Raises:
        UserError: a task can't be opened, none of its rows can be used, or the config refuses rows that can't be used.
    """

    def __init__(self, config: OfflineConfig, method: OfflineMethod[Any], observer: Observer) -> None:
        self.config = config
        self.method = method
        self.observer = observer
        self.notes = list[str]()
        tasks = {"task": config.task}
        if config.eval.task is not None:
            tasks["eval.task"] = config.eval.task
        opened = open_tasks(tasks, config.seed, may_skip=True)
        self.notes += overlap_notes(tasks, opened, limits_of(config))
        self.rows: dict[str, Rows] = {f"{name}: its rows": rows for name, rows in opened.items()}
        rows = opened["task"]
        self.items = method.joined(self._items(rows, len(rows), "task"))
        self.held_out = list[Any]()
        self.samples = list[Row]()
        if config.eval.task is not None:
            questions = opened["eval.task"]
            count = min(config.eval.limit or len(questions), len(questions))
            self.held_out = self._items(questions, count, "eval.task")
            shown = config.eval.samples if isinstance(config.eval, SampledEvalConfig) else 0
            for number in range(min(count, shown)):
                with suppress(EmptyPromptError):
                    self.samples.append(questions[number])
        self.cursor = Cursor(len(self.items), config.seed, config.data.shuffle)
        self.examples = config.train.examples_per_step
        self.whole_epochs = not config.train.steps

    def drawn(self, steps: int) -> list[int]:
        """The indices of the items that a run of `steps` steps uses, in ascending order."""
        if self.whole_epochs:
            return list(range(self.cursor.size))
        used = min(steps * self.examples, self.cursor.size)
        return sorted({self.cursor.row(uid) for uid in range(used)})

    def next(self) -> list[Any]:
        """The items of the next step."""
        count = self.examples
        if self.whole_epochs:
            count = min(count, self.cursor.size - self.cursor.drawn % self.cursor.size)
        return [self.items[self.cursor.row(uid)] for uid in self.cursor.next(count)]

    def _items(self, rows: Rows, count: int, name: str) -> list[Any]:
        """The items of the first `count` rows; adds a note about skipped rows."""
        items = list[Any]()
        skipped = Skipped()
        for number in range(count):
            self.observer.progress("tokenize", number, count, "rows")
            try:
                items.append(self.method.item(rows[number], number))
            except FieldError as problem:
                self._refuse_if_asked(problem, f"{row_place(rows, number)} of {name}")
                kind = re.sub(r"\d+", "N", f"{problem.field} {problem.bound}")
                skipped.setdefault(kind, []).append((number, problem))
        if skipped:
            total = sum(map(len, skipped.values()))
            verb = "is" if total == 1 else "are"
            share = f"{total:,} of {counted(count, 'row')} {verb} skipped"
            self.notes.append(f"{name}: {share}: {_skipped_reasons(skipped, rows)}")
        if not items:
            reason = f"{name}: none of its {counted(count, 'row')} can be used: {_skipped_reasons(skipped, rows)}"
            remedy = ""
            if skipped:
                _, first = max(skipped.values(), key=len)[0]
                remedy = first.remedy
            raise UserError(reason, remedy=remedy or "map other columns, or name another data set")
        return items

    def _refuse_if_asked(self, problem: FieldError, place: str) -> None:
        """Raise FieldError if the config refuses a data set with a row that has this problem."""
        setting = "unusable"
        allowed: str = self.config.data.unusable
        if isinstance(problem, OverLengthError):
            setting = "over_length"
            allowed = self.config.data.over_length
        if allowed == "refuse":
            bound = f"refuses {place}: {problem.reason}"
            remedy = problem.remedy or f"change the row, or set data.{setting}=skip"
            raise FieldError(f"data.{setting}", "refuse", bound, remedy=remedy) from None


def _skipped_reasons(skipped: Skipped, rows: Rows) -> str:
    """`completion is empty (pairs.jsonl:4, pairs.jsonl:18 and 4 more)`, most common reason first; numbers in a reason
    are those of its first row."""
    parts = []
    for alike in sorted(skipped.values(), key=len, reverse=True):
        problem = alike[0][1]
        named = ", ".join(row_place(rows, number) for number, _ in alike[:NAMED])
        if len(alike) > NAMED:
            named = f"{named} and {len(alike) - NAMED:,} more"
        parts.append(f"{problem.field} {problem.bound} ({named})")
    return "; ".join(parts)


UNSCORED = Score(value=float("nan"), valid=False)  # no reward is computed


class HeldOutSamples:
    """Held-out prompts, at least one, and a local engine that completes them greedily with the trained weights, in the
    dtype of the training. `max_length` bounds the tokens of prompt and completion together."""

    def __init__(
        self, prompts: Sequence[Prompt], stack: TrainStack, compute: ComputeThread, *, max_tokens: int, max_length: int
    ) -> None:
        self.prompts = prompts
        self.stack = stack
        self.compute = compute
        self.sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        weights = compute.call(stack.gathered, stack.model.device)
        setup = replace(EngineSetup.of(weights, max_length), compute=compute)
        dtype: Decided = "float32"
        if stack.model.compute_dtype == torch.bfloat16:
            dtype = "bfloat16"
        self.engine = Local(slots=len(prompts), dtype=dtype).build(setup)

    async def groups(self, version: int) -> list[Group]:
        """A group with one unscored completion for each prompt, under the current weights."""
        weights = await self.compute.run(self.stack.gathered)
        await self.engine.publish(WeightUpdate(version=version, module=weights.model))
        requests = [Request(prompt=prompt, sample=0, sampling=self.sampling) for prompt in self.prompts]
        completions = await collect(self.engine, requests)
        pairs = zip(self.prompts, completions, strict=True)
        return [Group(prompt=prompt, completions=(completion,), scores=(UNSCORED,)) for prompt, completion in pairs]


class OfflineLoop(TrainingLoop):
    """The loop of a run on a fixed data set, with everything that it uses.

    Args:
        config, stack, services: see `TrainingLoop`.
        method: builds the items and defines the loss.
        data: the items and their order.
        samples: held-out prompts that are completed at each evaluation; None: there are none.
    """

    def __init__(
        self,
        config: OfflineConfig,
        stack: TrainStack,
        method: OfflineMethod[Any],
        data: OfflineData,
        samples: HeldOutSamples | None,
        services: RunServices,
    ) -> None:
        super().__init__(config, config.train.steps_of(len(data.items)), stack, services)
        self.method = method
        self.data = data
        self.samples = samples
        self._cursor = data.cursor.state()  # of the last finished step: the items of a discarded one are drawn again

    async def train(self) -> None:
        if self.steps_left or not self.journal.was_evaluated(self.journal.step):
            await self.prepare()
        await self.evaluate_first()
        while self.steps_left:
            with self.next_step() as step:
                items = self.data.next()
                result = await self.update(items)
            await self.finish_step(self.record(step, len(items), result))
            await self.evaluate_if_due(step)
            await self.checkpoint_if_due(step)
        await self.evaluate_last()
        self.end_if_untrained()

    async def prepare(self) -> None:
        """Let the method prepare, once, the items that the run reaches and the held-out items."""

        def prepare(progress: Progress) -> None:
            drawn = self.data.drawn(self.steps)
            items = [self.data.items[i] for i in drawn]
            ready = self.method.prepare(items, progress, self.stack)
            for i, item in zip(drawn, ready, strict=True):
                self.data.items[i] = item
            self.data.held_out = self.method.prepare(self.data.held_out, progress, self.stack)

        with self.activity.stage("prepare"):
            await self.computed("prepare", prepare)

    async def update(self, items: list[Any]) -> UpdateResult:
        """Make one optimizer step on the items, without blocking the event loop."""
        self.step_complete = False
        update = partial(self.stack.update, self.method.objective(), [items])
        with self.timed("train"):
            return await self.computed("train", update)

    async def finish_step(self, record: dict[str, Any]) -> None:
        """Write the file, then commit the step to the journal in one transaction, so that every step in the journal has
        all its files."""
        with self.activity.stage("write", step=record["step"]):
            await self.disk.write(self.store.append_metrics, record)
            self._cursor = self.data.cursor.state()
            consume = partial(self.journal.consume, version=record["policy_version"])
            await self.disk.write(consume, record["step"], self._cursor, record)
            self.report_step(record)
        self.step_complete = True

    async def evaluate(self, label: str) -> None:
        step = self.journal.step
        start = self.now()
        if not self.data.held_out or self.journal.was_evaluated(step):
            return
        groups = list[Group]()
        with self.activity.stage("evaluate", step=step):
            measured = await self.measured()
            if self.samples is not None:
                groups = await self.cancel_on_stop(self.samples.groups(self.journal.version))
                await self.write_aside(self.store.write_evals, step, label, groups)
        record = self.evaluation_record(label, start)
        record |= {"examples": len(measured), "metric": self.method.headline, **self.method.summarise(measured)}
        if self.method.marks_model and read_checkpoint(self.folder.checkpoint(step)) is not None:
            await self.write_checkpoint(step)
        await self.keep_evaluation(record)
        self.observer.sampled(groups)

    async def measured(self) -> list[Any]:
        """The method's measurements on each held-out item."""
        measured: list[Any] = []
        while len(measured) < len(self.data.held_out):
            some = self.data.held_out[len(measured) : len(measured) + MEASURED_AT_ONCE]
            measuring = self.compute.run(self.method.measure, self.stack, some)
            measured += await self.cancel_on_stop(measuring)
            self.progress("evaluate", len(measured), len(self.data.held_out), "examples")
        return measured

    def checkpoint_contents(self) -> tuple[dict[str, Any], dict[str, Callable[[Path], None]]]:
        return {"cursor": self._cursor}, {}

    def record(self, step: int, examples: int, result: UpdateResult) -> dict[str, Any]:
        """The step's line of metrics.jsonl."""
        return {
            "kind": "train",
            "step": step,
            "time": self.now(),
            "examples": examples,
            "epoch": self.data.cursor.drawn / self.data.cursor.size,
            **mean_metrics(result.metrics),
            "updates": result.updates,
            "tokens/trained": result.tokens,
            "tokens_per_second/train": per_second(result.tokens, self.times["train"]),
            **{f"time/{name}": value for name, value in self.times.items()},
            **device_figures(result, self.stack, self.config.placement, result.tokens, self.times["step"]),
            **memory_figures(result, self.planned_memory),
            "policy_version": self.journal.version + 1,
        }
