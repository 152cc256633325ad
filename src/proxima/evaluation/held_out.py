"""Held-out evaluation: the same engine and the same rewards, on questions that training never sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from proxima.data.flow import EVAL_UID, Completion, Group, Prompt
from proxima.data.players import role_metrics
from proxima.engine.protocol import Engine
from proxima.evaluation.estimators import powers_of_two
from proxima.evaluation.group_metrics import estimates, mean_estimates, question_scores
from proxima.evaluation.headline import ACCURACY, CUT, REWARD
from proxima.evaluation.intervals import Interval, wilson_interval
from proxima.reward.runner import RewardRunner
from proxima.rollout.episodes.figures import episode_metrics
from proxima.rollout.episodes.played import EpisodeCallback
from proxima.rollout.episodes.worlds import AgentWorld, World
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.rollout.sources import SourceRewards, groups_by_source, player_by_source
from proxima.task.mix import TaskSource
from proxima.task.prompts import PromptSource
from proxima.task.protocol import Rows

Progress = Callable[[Any, int, int, str], None]  # (stage, done, total, unit), as `Observer.progress`


class Evaluation(RolloutListener):
    """Held-out questions, with the engine, rewards and sampling by which they are answered and scored. Their uids
    differ from all uids of training, and so do the random draws. `progress` receives the number of answers so far."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        generator: GroupGenerator,
        progress: Progress,
        sources: Sequence[TaskSource] = (),
    ) -> None:
        self.prompts = prompts
        self.generator = generator
        self.progress = progress
        self._before = 0
        self.sources = sources

    async def groups(self, answered: Sequence[Group] = (), keep: Callable[[Group], None] | None = None) -> list[Group]:
        """A scored group for each question, in the order of the questions.

        Args:
            answered: groups of an earlier attempt, which are not asked again.
            keep: called with each new group as soon as it is scored.
        """
        groups = {group.prompt.uid: group for group in answered}
        self._before = sum(len(group.completions) for group in answered)
        rest = [prompt for prompt in self.prompts if prompt.uid not in groups]
        async for group in self.generator.generate(rest, self):
            groups[group.prompt.uid] = group
            if keep is not None:
                keep(group)
        return [groups[prompt.uid] for prompt in self.prompts]

    def completed(self, done: int, total: int) -> None:
        self.progress("evaluate", self._before + done, self._before + total, "answers")


@dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """A set of held-out questions, before weights are loaded.

    Args:
        rewards: the specs that score its answers.
        rows: its data, of which the first `count` rows are asked.
        prompts: those of these rows, without prompts that are too long.
        groups: how the answers are generated.
        name: empty for the main set of a run.
        sources: of its task, each with its own environment, rewards and sampling, if it has them.
        worlds: of the sources that are played, by `world_path`; the caller closes them. Other answers are single turns.
    """

    rewards: Sequence[Any]
    rows: Rows
    count: int
    prompts: list[Prompt]
    groups: GroupSpec
    name: str = ""
    sources: Sequence[TaskSource] = ()
    worlds: Mapping[str, World | AgentWorld] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        source: PromptSource,
        limit: int,
        rewards: Sequence[Any],
        groups: GroupSpec,
        name: str,
        sources: Sequence[TaskSource] = (),
    ) -> "HeldOutSet":
        """The set of the first `limit` rows of a source; 0: all rows."""
        count = min(limit or len(source.rows), len(source.rows))
        prompts = (source.prompt(row, uid=EVAL_UID + row) for row in range(count))
        fitting = [prompt for prompt in prompts if prompt is not None]
        return cls(
            rewards=rewards,
            rows=source.rows,
            count=count,
            prompts=fitting,
            groups=groups,
            name=name,
            sources=tuple(sources),
        )

    def evaluation(
        self,
        engine: Engine,
        rewards: RewardRunner | SourceRewards,
        now: Callable[[], float],
        progress: Progress,
        log: Path | None = None,
        on_episode: EpisodeCallback | None = None,
    ) -> Evaluation:
        """The evaluation of its prompts; `log` and `on_episode` are those of `World.player`."""
        player = player_by_source(
            self.sources, engine, lambda path: self.worlds[path].player(engine, log, on_episode), on_episode
        )
        generator = GroupGenerator(engine, rewards, self.groups, now, player)
        return Evaluation(self.prompts, generator, progress, self.sources)


def named_sets(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The records of the sets of `eval.sets` within the record of an evaluation, by name."""
    names = [key.removesuffix("/questions") for key in record if key.endswith("/questions")]
    records: dict[str, dict[str, Any]] = {}
    for name in names:
        prefix = f"{name}/"
        records[name] = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
    return records


SOURCE = "source/"  # before the name of a source and that of its figure


def summary_by_source(sources: Sequence[TaskSource], groups: Sequence[Group]) -> dict[str, Any]:
    """`summarise` of the groups of each source of a mix, as `source/NAME/metric`; empty for one task."""
    parts = groups_by_source(sources, groups) if sources else {}
    figures: dict[str, Any] = {}
    for name, of_source in parts.items():
        figures |= {f"{SOURCE}{name}/{key}": value for key, value in summarise(of_source).items()}
    return figures


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """The metrics of a run's evaluation, as a flat mapping.

    Accuracy is the share of correct answers among the judged ones; a failed reward counts under `invalid`, never as
    wrong. `accuracy/low` and `accuracy/high` are its 95 % confidence interval: Wilson for one answer per question,
    bootstrap over the questions for several. Several answers also give `mean@n`, and `pass@k` for powers of two and n.
    These and the means of `mean_estimates` have bootstrap intervals (`bound_keys`). Episodes also have
    `episode_metrics` and `role_metrics`.
    """
    completions = list(chain.from_iterable(group.completions for group in groups))
    scores = list(chain.from_iterable(group.scores for group in groups))
    judged = [bool(score.correct) for score in scores if score.valid and score.correct is not None]
    figures: dict[str, Any] = {ACCURACY: None, "correct": None}
    if judged:
        shares = _shares(groups, judged)
        first = next(iter(shares.values()))  # the accuracy itself, or mean@n, whose interval it takes
        figures = _flat({ACCURACY: first, **shares})
        figures[ACCURACY] = sum(judged) / len(judged)
        figures["correct"] = sum(judged)
    return {
        **figures,
        "questions": len(groups),
        "answers": len(completions),
        "invalid": sum(not score.valid for score in scores),
        **dict.fromkeys((REWARD, "length/mean", CUT)),  # None without a sample that has it
        **_flat(mean_estimates(groups)),
        **role_metrics(groups),
        "tokens/generated": sum(completion.generated for completion in completions),
        **_episodes(completions),
    }


def _shares(groups: Sequence[Group], judged: Sequence[bool]) -> dict[str, Interval]:
    """Return the accuracy, or with several samples mean@n and pass@k."""
    samples = max(len(group.scores) for group in groups)
    if samples == 1:
        return {ACCURACY: wilson_interval(sum(judged), len(judged))}

    questions = [question_scores(group, None) for group in groups]
    return estimates(questions, samples, powers_of_two(samples), vote=False)


def _episodes(completions: Sequence[Completion]) -> dict[str, float]:
    if all(completion.episode is None for completion in completions):
        return {}

    return episode_metrics(completions)


def _flat(intervals: Mapping[str, Interval]) -> dict[str, float]:
    """Return each value together with the bounds of its interval."""
    figures: dict[str, float] = {}
    for name, interval in intervals.items():
        figures |= interval.figures(name)
    return figures
