"""Describe in a sentence what a stalled run is waiting for."""

from collections.abc import Mapping
from dataclasses import dataclass

from proxima.engine.protocol import Health
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.watch.activity import Activity

NAMED = 5  # prompts of a warning


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """The facts that `StallWatch` has at the moment of a warning.

    Args:
        activity, generator: as the watch has them.
        counts_tokens: the engine tells how many tokens it has sampled.
        health: the engine's last answer to a health check, `silent` seconds ago; None: there was none.
        answers: that was not too long ago.
        late: seconds and a sentence about the rank that the others wait for; None: there is none.
    """

    activity: Activity
    generator: GroupGenerator | None
    counts_tokens: bool
    health: Health | None
    silent: float
    answers: bool
    late: tuple[float, str] | None

    def sentence(self, still: float) -> str:
        """The warning of a stalled run: for how long, and what it waits for."""
        token = "no token and " if self.counts_tokens else ""
        waits = [*self._rewards(), *self._engine(), *self._work(), *self._ranks()] or [
            "groups, but none is being generated"
        ]
        return f"{token}no finished stage for {_duration(still)}: {self._stage()} waits for {'; '.join(waits)}"

    def _stage(self) -> str:
        stages = self.activity.stages
        step = next((stage.facts["step"] for stage in stages if "step" in stage.facts), None)
        where = {"evaluate": "the evaluation after ", "checkpoint": "the checkpoint of "}
        name = where.get(stages[-1].name, "") if stages else ""
        return f"{name}step {step}" if step is not None else "the run"

    def _rewards(self) -> list[str]:
        """The rewards that are pending, each with its prompts."""
        if self.generator is None:
            return []
        now, scoring = self.activity.now(), self.activity.scoring
        pending = []
        for label, uids in self.generator.rewards.awaited.items():
            if waiting := {uid: now - scoring.get(uid, now) for uid in uids}:
                longest = max(waiting.values())
                since = f" since {_duration(longest)}" if longest else ""
                pending.append(f"the reward `{label}` of {_prompts(waiting)}{since}")
        return pending

    def _engine(self) -> list[str]:
        """The prompts in the engine, and the engine's health."""
        generating = self.activity.generating
        asked = {stage.name for stage in self.activity.stages} & {"evaluate", "publish"}
        if self.generator is None or not (generating or asked):
            return []
        what = f"{_prompts(generating)} in the engine" if generating else "the engine"
        return [f"{what} ({self._engine_health()})"]

    def _engine_health(self) -> str:
        health = self.health
        parts = [f"process {health.detail['pid']}"] if health is not None and health.detail.get("pid") else []
        if health is None or not self.answers:
            parts.append(f"no answer to a health check for {_duration(self.silent)}")
        else:
            parts += [] if health.ok else ["not ready"]
            parts.append(f"{health.running} completions run and {health.waiting} wait")
            parts.append(f"last health check {_duration(self.silent)} ago")
        return ", ".join(parts)

    def _work(self) -> list[str]:
        """The work of this process, unless it only waits for others."""
        if not self.activity.stages:
            return ["the work between two stages"]
        stage = self.activity.stages[-1]
        if stage.name in ("generate", "publish") or (stage.name == "evaluate" and self.generator is not None):
            return []
        done = f"which has done {stage.done}" if stage.done else "which does not say how far it is"
        lasted = _duration(self.activity.now() - stage.since)
        return [f"its stage `{stage.name}`, started {lasted} ago, {done}"]

    def _ranks(self) -> list[str]:
        return [] if self.late is None else [self.late[1]]


def _prompts(waiting: Mapping[int, float]) -> str:
    """`prompt 41`, `3 prompts (41, 42, 45)`."""
    uids = sorted(waiting)
    if len(uids) == 1:
        return f"prompt {uids[0]}"
    shown = ", ".join(map(str, uids[:NAMED])) + (" …" if len(uids) > NAMED else "")
    return f"{len(uids)} prompts ({shown})"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
