"""What an evaluation from the command line asks: sets of questions, opened before any weights are read.

An `Exam` is a named set or a recipe's `eval`; `open_exams` finds its data, lets the rewards look at the answers, and
makes the prompts, so that what is wrong with them is said first. `runtime.examine` asks the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from proxima.data import Prompt, UserError
from proxima.engine import ENGINES
from proxima.engine.protocol import Sampling
from proxima.evaluate.eval_metrics import check_ks
from proxima.evaluate.suites import Suite
from proxima.model.load import load_config, load_tokenizer
from proxima.reward import REWARDS
from proxima.runtime.build import EVAL_UID, evaluation_sampling
from proxima.runtime.interrupt import quiet_transformers
from proxima.runtime.preflight import Answers, survey_answers
from proxima.task import TASKS
from proxima.task.cursor import Cursor, Draw
from proxima.task.prompts import PromptSource

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Exam:
    """A set of questions, how it is put and how it is judged.

    Args:
        name: file name of its answers, and key in the result.
        task: the questions.
        rewards: who judges.
        sampling, samples: how the answers are drawn, and how many a question.
        limit: questions at most, the first of the data; 0: all.
        data: where the questions come from, for people.
        remedy: what to do where they can't be had; empty: the error says enough.
    """

    name: str
    task: Any
    rewards: tuple[Any, ...]
    sampling: Sampling
    samples: int = 1
    limit: int = 0
    data: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenExam:
    """An exam whose questions are ready to be asked.

    Args:
        prompts: those that fit the context; `skipped` do not.
        rows: of the whole data set.
        sampling: that of the exam, with no more tokens than the context has.
        context: tokens that prompt and answer may have together.
        notes: what a person should know of the data.
    """

    exam: Exam
    prompts: list[Prompt]
    skipped: int
    rows: int
    sampling: Sampling
    context: int
    notes: tuple[str, ...] = ()


def of_suite(
    suite: Suite,
    *,
    given: Path | None = None,
    data: Path | None = None,
    samples: int = 1,
    limit: int = 0,
    sampling: Mapping[str, Any],
) -> Exam:
    """The exam of a suite: greedy for one sample, temperature 1 for several, the suite's `max_tokens`; `sampling` holds
    what differs.

    Raises:
        ValueError: no data at the place given, a reward's package is missing, several samples at temperature 0.
    """
    settings = {"temperature": 0.0 if samples == 1 else 1.0, "max_tokens": suite.max_tokens, **sampling}
    if samples > 1 and settings["temperature"] == 0:
        remedy = "greedy answers are all the same; set --temperature 1, or --samples 1"
        raise UserError(f"samples={samples} must be 1 at temperature 0: {remedy}")
    task, place = suite.find(given, data)
    return Exam(
        name=suite.name,
        task=task,
        rewards=tuple(suite.judges()),
        sampling=Sampling(**settings),
        samples=samples,
        limit=limit,
        data=place,
        remedy=f"{suite.remedy}, or name a file: --task {suite.name}=PATH",
    )


def of_recipe(config: "RunConfig") -> Exam:
    """The exam that a recipe's `eval` is, judged by its rewards.

    Raises:
        ValueError: it has none.
    """
    if config.eval.task is None:
        raise UserError(
            "eval.task=None: there is nothing to evaluate; name a task, for example eval.task.kind=gsm8k, or "
            "--task gsm8k"
        )
    held_out, name = config.eval, kind_of(config.eval.task)
    return Exam(
        name=name,
        task=held_out.task,
        rewards=tuple(config.reward),
        sampling=evaluation_sampling(config),
        samples=held_out.samples,
        limit=held_out.limit,
        data=str(getattr(held_out.task, "path", "") or name),
    )


def open_exams(config: "RunConfig", exams: Sequence[Exam], ks: Sequence[int] = ()) -> list[OpenExam]:
    """Data and prompts of all exams; needs the tokenizer, no weights.

    Raises:
        ValueError: a k above the samples, data that can't be had, answers that no reward can read (more than
            `data.max_unreadable`), prompts none of which fits; one line each.
    """
    for exam in exams:
        check_ks(ks, exam.samples)
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    opened = [
        (exam, *_rows(config, exam)) for exam in exams
    ]  # a file that isn't there is said before transformers is imported
    with quiet_transformers():
        found = load_config(config.model.path, config.model.revision)
        tokenizer = load_tokenizer(config.model.path, config.model.revision)
    limit = int(getattr(found.get_text_config(), "max_position_embeddings", 0) or 1 << 20)
    context = min(config.model.max_length or limit, limit)
    return [_open(config, exam, rows, notes, tokenizer, context) for exam, rows, notes in opened]


def _rows(config: "RunConfig", exam: Exam) -> tuple[Any, list[str]]:
    """The rows, and what the rewards say of their answers."""
    try:
        rows = exam.task.rows(config.seed)
    except ValueError as error:
        if not exam.remedy:
            raise
        reason = " ".join(str(error).split()).partition("; without a network")[0]
        raise UserError(f"{exam.name}: {reason}; {exam.remedy}") from None
    asked = Answers(name=exam.name, rows=rows, count=min(exam.limit or len(rows), len(rows)))
    return rows, survey_answers(replace(config, reward=exam.rewards), [asked])


def _open(config: "RunConfig", exam: Exam, rows: Any, notes: Sequence[str], tokenizer: Any, context: int) -> OpenExam:
    cursor, data = Cursor(len(rows), config.seed, False), config.data
    source = PromptSource(
        rows, tokenizer, context=context, cursor=cursor, system=data.system, over_length=data.over_length
    )
    count = min(exam.limit or len(rows), len(rows))
    fitting = [source.prompt(Draw(uid=EVAL_UID + i, index=i, epoch=0)) for i in range(count)]
    prompts = [prompt for prompt in fitting if prompt is not None]
    if not prompts:
        raise UserError(
            f"{exam.name}: none of the {count} questions fits a context of {context} tokens; raise model.max_length"
        )
    sampling = exam.sampling if exam.sampling.max_tokens < context else _shorter(exam.sampling, context)
    skipped = count - len(prompts)
    return OpenExam(
        exam=exam,
        prompts=prompts,
        skipped=skipped,
        rows=len(rows),
        sampling=sampling,
        context=context,
        notes=tuple(notes),
    )


def _shorter(sampling: Sampling, context: int) -> Sampling:
    return Sampling(**{**vars(sampling), "max_tokens": context - 1})


def kind_of(spec: Any) -> str:
    """The name of a spec's kind."""
    tables: dict[str, type] = {**TASKS, **REWARDS, **ENGINES}
    return next((kind for kind, cls in tables.items() if cls is type(spec)), type(spec).__name__.lower())
