"""The sections `eval` and `checkpoint`: held-out evaluation, and the checkpoints that are kept."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.data import role_metric_names
from proxima.data import require
from proxima.data.errors import suggestion
from proxima.data.kinds import Kinds, Slot
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.engine.protocol import Sampling
from proxima.evaluation.estimators import powers_of_two
from proxima.evaluation.intervals import PART
from proxima.evaluation.plateau import Plateau
from proxima.reward.base import as_reward
from proxima.rollout.generator import GroupSpec
from proxima.task import TASKS
from proxima.task.held_out_part import SplitTask

RECORD_WORDS = ("accuracy", "length", "main", "reward", "time", "tokens")  # first words of an evaluation's own metrics
NO_DIRECTION = ("length", "length/mean", "truncated", "truncated_fraction")  # metrics that are not better when higher


def _require_random_samples(config: Any) -> None:
    require_at_least(config, 1, "samples")
    same = config.samples > 1 and config.sampling is not None and config.sampling.temperature == 0
    bound = "must be 1 at temperature 0: greedy answers are identical"
    remedy = "set the temperature of its sampling to 1, or samples to 1"
    require(not same, "samples", config.samples, bound, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """A set of held-out questions in addition to `eval.task`: its metrics are `NAME/accuracy` and so on."""

    name: Annotated[str, "begins the names of its metrics, and of its files in evals/"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "held-out questions"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "what scores the answers; none: the run's"] = ()
    limit: Annotated[int, "questions at most; 0: all"] = 200
    samples: Annotated[int, "completions a question; several give mean@n and pass@k"] = 1
    sampling: Annotated[Sampling | None, "null: the training sampling, and greedy where samples is 1"] = None

    def __post_init__(self) -> None:
        named = re.fullmatch(r"[A-Za-z0-9_.+-]*", self.name) is not None and self.name not in RECORD_WORDS
        bound = f"must be letters, digits and _ . + -, and none of {', '.join(RECORD_WORDS)}"
        require(named, "name", self.name, bound)
        require_at_least(self, 0, "limit")
        _require_random_samples(self)

    def groups(self, seed: int) -> GroupSpec:
        """How the questions are answered."""
        assert self.sampling is not None  # `resolve` sets it where there is a task
        return GroupSpec(sampling=self.sampling, completions=self.samples, seed=seed)


EVAL_SETS = Kinds({"set": "proxima.config.sections.eval:EvalSetConfig"})


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    task: Annotated[Any, Slot("proxima.task:TASKS"), "held-out questions"] = None
    limit: Annotated[int, "questions at most; 0: all"] = 200
    every: Annotated[int, "steps between evaluations; 0: only before and after"] = 0
    before: Annotated[bool, "evaluate before the first step"] = True
    after: Annotated[bool, "evaluate after the last step"] = True
    samples: Annotated[int, "completions a question; several give mean@n and pass@k"] = 1
    sampling: Annotated[Sampling | None, "null: the training sampling, and greedy where samples is 1"] = None
    metric: Annotated[str | None, "what is reported and kept as best; null: accuracy, or else the mean reward"] = None
    stop_after: Annotated[Plateau | None, "end the run on a plateau of a held-out figure; null: never"] = None
    sets: Annotated[
        Any, Slot("proxima.config.sections.eval:EVAL_SETS", many=True, default="set"), "further, named sets"
    ] = ()

    def __post_init__(self) -> None:
        require_at_least(self, 0, "limit", "every")
        require_evaluations(self, self.metric)
        _require_random_samples(self)
        names = [held_out.name for held_out in self.sets]
        require(len({*names, ""}) > len(names), "sets", names, "must be names, each once")
        missing = bool(names) and self.task is None
        remedy = "move the first of the sets to eval.task"
        require(not missing, "task", None, "must be set if eval.sets is set", remedy=remedy)

    @property
    def all_sets(self) -> dict[str, EvalSetConfig]:
        """Every set by its dotted path: `eval.task` with an empty name, then those of `sets`; empty without a task."""
        if self.task is None:
            return {}
        main = EvalSetConfig(name="", task=self.task, limit=self.limit, samples=self.samples, sampling=self.sampling)
        return {"eval": main} | {f"eval.sets.{i}": held_out for i, held_out in enumerate(self.sets)}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[int, "steps between checkpoints; 0: only at the end"] = 0
    keep_last: Annotated[int, "checkpoints kept; 0: all"] = 2
    keep_best: Annotated[
        bool, "also keep the best one of the held-out evaluations: by eval.metric; of sft, the lowest loss"
    ] = False

    def __post_init__(self) -> None:
        require_at_least(self, 0, "every", "keep_last")


def require_evaluations(config: Any, metric: str | None = None) -> None:
    """Raise `FieldError` if the metric of `stop_after` is not measured during the run, or is not better when higher."""
    measured = config.stop_after is None or (config.task is not None and config.every > 0)
    remedy = "set eval.task, and eval.every to the steps between two evaluations"
    require(measured, "stop_after", config.stop_after, "needs evaluations during the run", remedy=remedy)
    metric = config.stop_after and (config.stop_after.metric or metric)
    name = next((name for name in NO_DIRECTION if f"/{metric}".endswith(f"/{name}")), None)
    remedy = "name the accuracy, the reward or a reward"
    require(name is None, "stop_after.metric", metric, "is not better when it is higher", remedy=remedy)


def evaluations_are_configured(eval: Any, checkpoint: CheckpointConfig) -> Findings:
    """`every` and `keep_best` need evaluations, which need a task."""
    if eval.every and eval.task is None:
        yield "eval.every", "there is nothing to evaluate; set eval.task, or eval.every=0"
    if checkpoint.keep_best and (eval.task is None or not eval.every):
        message = "evaluations during the run choose the best checkpoint; set eval.task and eval.every, or false"
        yield "checkpoint.keep_best", message


def evaluation_is_held_out(task: Any, eval: Any) -> Findings:
    """Warn if training and evaluation have questions in common."""
    sets = list[tuple[str, Any]]()
    for path, spec in eval.all_sets.items():
        sets += [(f"{path}.task", part) for part in parts_of(spec.task)]
    for (path, asked), trained in product(sets, parts_of(task)):
        if TASKS.holds(asked, "seeds"):  # its uids, and therefore its seeds, differ
            continue
        if isinstance(asked, SplitTask) and asked.shares_data(trained):
            yield from _of_a_split(path, asked, trained)
        elif asked == trained:
            remedy = f"name another file with {path}.path" if hasattr(asked, "path") else "set another split"
            yield path, f"has the same questions as `task`, so it measures training data; {remedy}"
        elif all(TASKS.holds(part, "arithmetic") for part in (asked, trained)):
            share = {part.split: part.held_out for part in (trained, asked)}  # one, if both are of the same split
            if len(share) == 1 or share["test"] > share["train"]:
                remedy = "set split train for `task`, test here, and equal `held_out`"
                yield path, f"training uses some of its questions; {remedy}"


def _of_a_split(path: str, asked: SplitTask, trained: SplitTask) -> Findings:
    """Warn unless training leaves out all rows of a task with the same data: a question that is held out for one share
    is so for any larger one."""
    if asked.part == "held_out" and trained.part == "train" and (asked.held_out or 0) <= (trained.held_out or 0):
        return
    remedy = f"name another file with {path}.path, or leave eval.task out and set task.held_out=0.1"
    if trained.held_out is not None:
        remedy = f"leave eval.task out, or set {path}.part=held_out and {path}.held_out={trained.held_out:g}"
    what = "has the same questions as `task`" if asked.part == trained.part else "has questions of `task`"
    yield path, f"{what}, so it measures training data; {remedy}"


def parts_of(task: Any) -> list[Any]:
    """The tasks of a mix that it reads, or the task alone."""
    if not TASKS.holds(task, "mix"):
        return [task]
    parts = list[Any]()
    for source in task.sources.values():
        parts += parts_of(source.task)
    return parts


def evaluation_metric_exists(r: Resolved[Any], eval: EvalConfig, reward: Sequence[Any]) -> Findings:
    """`eval.metric` must be a metric of evaluations; a reward's own parts, `name/part`, are only known when it runs.
    `keep_best` needs one for which higher is better."""
    if eval.metric is None:
        return
    metric, samples, scored_by = _metric_of_a_set(eval, eval.metric, reward)
    rewards = {as_reward(spec).label for spec in scored_by}
    metrics = {*METRICS, *METRIC_ALIASES, *rewards, *role_metric_names(eval.task)}
    if samples > 1:
        metrics.add(f"mean@{samples}")
        metrics |= {f"pass@{k}" for k in powers_of_two(samples) if k > 1}
    if metric not in metrics and metric.removeprefix(PART).partition("/")[0] not in rewards:
        also = "NAME/PART for a part of a reward's own"
        yield "eval.metric", f"an evaluation has no such metric; {suggestion(metric, metrics, also)}"
    if r.get("checkpoint.keep_best") and metric in ("length", "truncated"):
        message = "checkpoint.keep_best keeps the highest value, and of this metric that is not the best"
        yield "eval.metric", f"{message}; name the accuracy, the reward or a reward"


def _metric_of_a_set(eval: EvalConfig, full_name: str, rewards: Sequence[Any]) -> tuple[str, int, Sequence[Any]]:
    """`eval.metric` without the name of a set before it, and the samples and rewards of the set that it belongs to."""
    name, _, metric = full_name.partition("/")
    for held_out in eval.sets:
        if metric and held_out.name == name:
            return metric, held_out.samples, held_out.reward or rewards
    return full_name, eval.samples, rewards
