"""The question sets of `proxima eval`, loaded and validated before any weights are read.

An `EvalSuite` is a named set or a recipe's `eval` section. `load_suites` finds its data, lets the rewards check the
reference answers, and builds the prompts; `eval_run` then runs the model on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from proxima.config.describe import kind_of
from proxima.data import FieldError, Prompt, UserError
from proxima.engine.protocol import Sampling
from proxima.evaluate.eval_metrics import check_ks
from proxima.evaluate.suites import Suite
from proxima.model.load import load_config, load_tokenizer
from proxima.runtime.build import EVAL_UID
from proxima.runtime.interrupt import quiet_transformers
from proxima.runtime.preflight import ReferenceAnswers, validate_answers
from proxima.task.cursor import Cursor, Draw
from proxima.task.prompts import PromptSource

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig


@dataclass(frozen=True, kw_only=True)
class EvalSuite:
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
class LoadedSuite:
    """A suite whose questions are ready to be asked.

    Args:
        prompts: those that fit the context; `skipped` do not.
        rows: of the whole data set.
        sampling: that of the suite, with no more tokens than the context has.
        context: tokens that prompt and answer may have together.
        notes: what a person should know of the data.
    """

    suite: EvalSuite
    prompts: list[Prompt]
    skipped: int
    rows: int
    sampling: Sampling
    context: int
    notes: tuple[str, ...] = ()


def named_suite(
    suite: Suite,
    *,
    given: Path | None = None,
    data: Path | None = None,
    samples: int = 1,
    limit: int = 0,
    sampling: Mapping[str, Any],
) -> EvalSuite:
    """A named suite: greedy for one sample, temperature 1 for several, its own `max_tokens`; `sampling` overrides.

    Raises:
        ValueError: no data at the place given, a reward's package is missing, several samples at temperature 0.
    """
    settings = {"temperature": 0.0 if samples == 1 else 1.0, "max_tokens": suite.max_tokens, **sampling}
    if samples > 1 and settings["temperature"] == 0:
        remedy = "greedy answers are all the same; set --temperature 1, or --samples 1"
        raise UserError(f"samples={samples} must be 1 at temperature 0: {remedy}")
    task, place = suite.find(given, data)
    return EvalSuite(
        name=suite.name,
        task=task,
        rewards=tuple(suite.judges()),
        sampling=Sampling(**settings),
        samples=samples,
        limit=limit,
        data=place,
        remedy=f"{suite.remedy}, or name a file: --task {suite.name}=PATH",
    )


def recipe_suite(config: "EvaluateConfig") -> EvalSuite:
    """The suite that a recipe's `eval` section describes, judged by its rewards.

    Raises:
        ValueError: it has none.
    """
    if config.eval.task is None:
        remedy = "name a task, for example eval.task.kind=gsm8k, or --task gsm8k"
        raise FieldError("eval.task", None, "leaves nothing to evaluate", remedy=remedy)
    held_out, name = config.eval, kind_of(config.eval.task).rpartition(":")[2].lower()  # a file is named by it
    return EvalSuite(
        name=name,
        task=held_out.task,
        rewards=tuple(config.reward),
        sampling=held_out.sampling or Sampling(temperature=0.0 if held_out.samples == 1 else 1.0),
        samples=held_out.samples,
        limit=held_out.limit,
        data=str(getattr(held_out.task, "path", "") or name),
    )


def load_suites(config: "EvaluateConfig", suites: Sequence[EvalSuite], ks: Sequence[int] = ()) -> list[LoadedSuite]:
    """Data and prompts of all suites; needs the tokenizer, no weights.

    Raises:
        ValueError: a k above the samples, data that can't be had, answers that no reward can read (more than
            `data.max_unreadable`), prompts none of which fits; one line each.
    """
    for suite in suites:
        check_ks(ks, suite.samples)
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    opened = [
        (suite, *_rows(config, suite)) for suite in suites
    ]  # a file that isn't there is said before transformers is imported
    with quiet_transformers():
        found = load_config(config.model.path, config.model.revision)
        tokenizer = load_tokenizer(config.model.path, config.model.revision)
    limit = int(getattr(found.get_text_config(), "max_position_embeddings", 0) or 1 << 20)
    context = min(config.model.max_length or limit, limit)
    return [_open(config, suite, rows, notes, tokenizer, context) for suite, rows, notes in opened]


def _rows(config: "EvaluateConfig", suite: EvalSuite) -> tuple[Any, list[str]]:
    """The rows, and what the rewards say of their answers."""
    try:
        rows = suite.task.rows(config.seed)
    except UserError as error:
        if not suite.remedy:
            raise
        raise UserError(f"{suite.name}: {' '.join(error.reason.split())}", remedy=suite.remedy) from None
    asked = ReferenceAnswers(name=suite.name, rows=rows, count=min(suite.limit or len(rows), len(rows)))
    return rows, validate_answers(replace(config, reward=suite.rewards), [asked])


def _open(
    config: "EvaluateConfig", suite: EvalSuite, rows: Any, notes: Sequence[str], tokenizer: Any, context: int
) -> LoadedSuite:
    cursor, data = Cursor(len(rows), config.seed, False), config.data
    source = PromptSource(
        rows, tokenizer, context=context, cursor=cursor, system=data.system, over_length=data.over_length
    )
    count = min(suite.limit or len(rows), len(rows))
    fitting = [source.prompt(Draw(uid=EVAL_UID + i, index=i, epoch=0)) for i in range(count)]
    prompts = [prompt for prompt in fitting if prompt is not None]
    if not prompts:
        raise UserError(
            f"{suite.name}: none of the {count} questions fits a context of {context} tokens; raise model.max_length"
        )
    sampling = suite.sampling if suite.sampling.max_tokens < context else _shorter(suite.sampling, context)
    skipped = count - len(prompts)
    return LoadedSuite(
        suite=suite,
        prompts=prompts,
        skipped=skipped,
        rows=len(rows),
        sampling=sampling,
        context=context,
        notes=tuple(notes),
    )


def _shorter(sampling: Sampling, context: int) -> Sampling:
    return Sampling(**{**vars(sampling), "max_tokens": context - 1})
