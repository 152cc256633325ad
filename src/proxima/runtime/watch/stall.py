"""Notices a stalled run, and says what it waits for."""

import asyncio
import time
from collections.abc import Callable, Mapping

from proxima.data.flow import prompt_name
from proxima.engine.protocol import Health
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.watch.activity import Activity

CHECKS = 10  # per stall period
PATIENCE = 5.0  # seconds that a health check may take
NAMED = 5  # prompts of a warning


class StallWatch:
    """Warns when there was no token and no finished stage for `seconds`, and again each time that the stall has lasted
    twice as long, until something moves.

    A token counts when the engine's health check reports it; a stage of the loop, a part of an update or an
    evaluation, and a prompt that passes from state to state count at once. It waits in the event loop, which is free
    while the compute thread works.

    Args:
        seconds: the length of a stall; 0: `run` ends at once.
        generator: engine and rewards; None: there are none.
        on_health: gets each answer of the engine to a health check.
        late: seconds and a sentence about the rank that the others wait for, at a moment of the monotonic clock; None:
            there is none.
    """

    def __init__(
        self, seconds: float, activity: Activity, warn: Callable[[str], None], generator: GroupGenerator | None,
        on_health: Callable[[Health], None], late: Callable[[float], tuple[float, str] | None] | None = None,
    ) -> None:  # fmt: skip
        self.seconds = seconds
        self.activity = activity
        self.warn = warn
        self.interval = seconds / CHECKS
        self.generator = generator
        self.on_health = on_health
        self.late = late
        self.health: Health | None = None  # the last answer
        self.answered_at = activity.now()
        self.tokens: int | None = None  # sampled, as an engine last said that was ready

    async def run(self) -> None:
        """Watch until cancelled."""
        wait = self.seconds
        while self.seconds:
            await asyncio.sleep(self.interval)
            await self._ask_engine()
            still = self.activity.now() - self.activity.moved_at
            if still < self.seconds:
                wait = self.seconds
            elif still >= wait:
                self.warn(stall_report(self, still))
                wait *= 2

    async def _ask_engine(self) -> None:
        if self.generator is None:
            return
        try:
            health = await asyncio.wait_for(self.generator.engine.health(), min(PATIENCE, self.interval))
        except Exception:  # whatever it is, it is no answer
            return
        self.health = health
        self.answered_at = self.activity.now()
        self.on_health(health)
        if health.tokens is not None:
            if self.tokens not in (None, health.tokens):
                self.activity.moved()
            self.tokens = health.tokens


def stall_report(watch: StallWatch, still: float) -> str:
    """The warning of a stalled run: for how long, and what it waits for."""
    waits = [*_rewards(watch), *_engine(watch), *_work(watch), *_ranks(watch)]
    awaited = "; ".join(waits) or "groups, but none is being generated"
    missing = "no finished stage"
    if watch.tokens is not None:
        missing = "no token and no finished stage"
    return f"{missing} for {_duration(still)}: {_stage(watch)} waits for {awaited}"


def _stage(watch: StallWatch) -> str:
    stages = watch.activity.stages
    steps = [stage.facts["step"] for stage in stages if "step" in stage.facts]
    if not steps:
        return "the run"
    where = {"evaluate": "the evaluation after ", "checkpoint": "the checkpoint of "}
    return f"{where.get(stages[-1].name, '')}step {steps[0]}"


def _rewards(watch: StallWatch) -> list[str]:
    """The rewards that are pending, each with its prompts."""
    if watch.generator is None:
        return []
    now = watch.activity.now()
    scoring = watch.activity.scoring
    pending = []
    for label, uids in watch.generator.rewards.awaited.items():
        waiting = {uid: now - scoring.get(uid, now) for uid in uids}
        if waiting:
            text = f"the reward `{label}` of {_prompts(waiting)}"
            longest = max(waiting.values())
            if longest:
                text = f"{text} since {_duration(longest)}"
            pending.append(text)
    return pending


def _engine(watch: StallWatch) -> list[str]:
    """The prompts in the engine, and the engine's health."""
    generating = watch.activity.generating
    asked = {stage.name for stage in watch.activity.stages} & {"evaluate", "publish"}
    if watch.generator is None or not (generating or asked):
        return []
    what = f"{_prompts(generating)} in the engine" if generating else "the engine"
    return [f"{what} ({_engine_health(watch)})"]


def _engine_health(watch: StallWatch) -> str:
    health = watch.health
    silent = watch.activity.now() - watch.answered_at
    parts = []
    if health is not None and health.detail.get("pid"):
        parts.append(f"process {health.detail['pid']}")
    if health is None or silent > 2 * watch.interval:
        parts.append(f"no answer to a health check for {_duration(silent)}")
    else:
        if not health.ok:
            parts.append("not ready")
        parts.append(f"{health.running} completions run and {health.waiting} wait")
        parts.append(f"last health check {_duration(silent)} ago")
    return ", ".join(parts)


def _work(watch: StallWatch) -> list[str]:
    """The work of this process, unless it only waits for others."""
    if not watch.activity.stages:
        return ["the work between two stages"]
    stage = watch.activity.stages[-1]
    if stage.name in ("generate", "publish") or (stage.name == "evaluate" and watch.generator is not None):
        return []
    done = f"which has done {stage.done}" if stage.done else "progress unknown"
    lasted = _duration(watch.activity.now() - stage.since)
    return [f"its stage `{stage.name}`, started {lasted} ago, {done}"]


def _ranks(watch: StallWatch) -> list[str]:
    """The rank that the others wait for."""
    late = None if watch.late is None else watch.late(time.monotonic())
    if late is None:
        return []
    _, sentence = late
    return [sentence]


def _prompts(waiting: Mapping[int, float]) -> str:
    """`prompt 41`, `3 prompts (41, 42, 45)`."""
    uids = sorted(waiting)
    if len(uids) == 1:
        return prompt_name(uids[0])
    shown = ", ".join(map(str, uids[:NAMED]))
    if len(uids) > NAMED:
        shown = f"{shown} …"
    return f"{len(uids)} prompts ({shown})"


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"
