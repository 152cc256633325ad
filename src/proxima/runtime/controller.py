"""The loop. Read `Controller.run` top to bottom and you have read the method.

    task → engine → reward → advantage → selection → pack → model → surrogate → aggregate → step → publish

A deterministic state machine: where each prompt stands is in the journal before anyone acts on it, and nobody but the
injected clock knows the time. Synchronous training is `max_lag: 0`: no prompt is admitted for a step before the step
before it was published.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from proxima.config.schema import DynamicSamplingConfig
from proxima.core.correction import health
from proxima.data import Group, Trajectory
from proxima.engine.protocol import Engine, Sampling
from proxima.model import Policy
from proxima.reward.runner import RewardRunner
from proxima.runtime.algorithm import Algorithm, StepBatch
from proxima.runtime.carried_groups import CARRIED_GROUPS, write_groups
from proxima.runtime.clock import Clock
from proxima.runtime.collect import CannotGoOn, Collected, Collector, NothingScored, errors_of
from proxima.runtime.folder import RunFolder
from proxima.runtime.held_out import Evaluation
from proxima.runtime.journal import Journal
from proxima.runtime.observer import Observer, Sample
from proxima.runtime.rollouts import write_rollouts
from proxima.runtime.step_metrics import mean_metrics, rollout_metrics
from proxima.task.prompts import PromptSource
from proxima.train import PolicyObjective, TrainStack, UpdateResult
from proxima.train.checkpoint import checkpoints, prune, read_checkpoint, write_checkpoint


class Stopped(Exception):
    """The user asked the run to end; what is unfinished of the step is given up, and a resume makes it again."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of the loop.

    Args:
        steps, prompts_per_step, completions_per_prompt: see `TrainConfig`.
        evaluate_every, checkpoint_every: in steps; 0 is never on the way.
        keep_last, keep_best: see `CheckpointConfig`.
        sampling: of the training completions.
        seed: of every draw.
        recompute_proximal: run the proximal log-probs before the updates (`proximal: recompute`); when a step has one
            update only, its first forward is that forward.
        refill: dynamic sampling; None takes every group as it comes.
        max_unscored_steps: steps in a row without a score after which the run ends; 0: never.
    """

    steps: int
    prompts_per_step: int
    completions_per_prompt: int
    sampling: Sampling
    seed: int
    evaluate_every: int = 0
    evaluate_before: bool = True
    evaluate_after: bool = True
    checkpoint_every: int = 0
    keep_last: int = 2
    keep_best: bool = False
    recompute_proximal: bool = False
    refill: DynamicSamplingConfig | None = None
    max_unscored_steps: int = 0


@dataclass
class Controller:
    """Everything the loop touches, and the loop. Made by `proxima.runtime.run`; a test makes its own with fakes.

    Args:
        plan: the numbers.
        source: gives prompts in order; its state is the data cursor.
        engine, rewards: from prompt to scored group.
        algorithm: from scored groups to updates.
        policy, stack, objective: the weights, what updates them, and by which loss.
        reference: the frozen policy that a penalty pulls to; None without one.
        evaluation: None without held-out questions.
        journal, folder: what survives.
        clock, observer: time, and who watches.
        elapsed: seconds the run took before this process.
        carried: scored groups that a checkpoint kept for the next step.
    """

    plan: Plan
    source: PromptSource
    engine: Engine
    rewards: RewardRunner
    algorithm: Algorithm
    policy: Policy
    stack: TrainStack
    objective: PolicyObjective
    journal: Journal
    folder: RunFolder
    clock: Clock
    observer: Observer
    evaluation: Evaluation | None = None
    reference: Policy | None = None
    elapsed: float = 0.0
    carried: Sequence[Group] = ()

    def __post_init__(self) -> None:
        self._began = self.clock.now() - self.elapsed
        self._stop = asyncio.Event()
        self._times: dict[str, float] = {}
        self._why_unscored = ""
        self._surplus: Sequence[Group] = self.carried  # of the last finished step
        self._cursor = (
            self.source.state()
        )  # behind the last finished step: prompts of one that is given up are drawn again
        self.collector = Collector(
            prompts=self.plan.prompts_per_step * self.algorithm.prompts_factor(self.plan.completions_per_prompt),
            completions=self.plan.completions_per_prompt,
            sampling=self.plan.sampling,
            seed=self.plan.seed,
            refill=self.plan.refill,
            source=self.source,
            engine=self.engine,
            rewards=self.rewards,
            algorithm=self.algorithm,
            journal=self.journal,
            clock=self.clock,
            observer=self.observer,
            unless_stopped=self.unless_stopped,
            carried=list(self.carried),
        )

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Run to the last step and its evaluation, or to `stop`. Returns True when all is done; a checkpoint is there
        in either case."""
        done = False
        try:
            await self.engine.publish(self.policy.model, self.journal.version)
            if self.journal.step == 0 and self.plan.evaluate_before:
                await self.evaluate("before")
            await self.evaluate_if_due(self.journal.step)  # an interrupted run owes it still
            while self.journal.step < self.plan.steps:
                step = self.journal.step + 1
                self._times = {}
                spent = self.clock.cpu()
                with self.timed("step"):
                    collected = await self.collect()  # queued → generating → scored
                    chosen = self.algorithm.choose(collected.groups, step, collected.dropped)
                    self.journal.select(step, chosen.kept, chosen.dropped)  # scored → selected | dropped
                    result = self.update(chosen)
                    await self.publish(step)
                self._times["cpu"] = self.clock.cpu() - spent
                record = self.record(step, collected, chosen, result)
                self.finish_step(
                    step, collected, chosen, result, record
                )  # selected | dropped → consumed: the step is done
                await self.evaluate_if_due(step)
                self.checkpoint_if_due(step)
                self.end_if_nothing_is_scored(step)
            if self.plan.evaluate_after:
                await self.evaluate("after")
            done = True
        except Stopped:
            pass
        except CannotGoOn as end:  # the run ends here; what it learned is kept, and what there is to see of the step
            if end.dropped:
                nothing = self.algorithm.choose((), self.journal.step + 1, end.dropped)
                write_rollouts(
                    self.folder.rollout_file(self.journal.step + 1),
                    self.journal.step + 1,
                    nothing.groups,
                    nothing.records({}),
                )
            self.checkpoint(self.journal.step)
            raise
        finally:
            self.collector.cancel()
        self.checkpoint(self.journal.step)
        return done

    def stop(self) -> None:
        """Ask the loop to end; it does so at the next point where nothing is half-written. Safe from a signal handler
        on the loop."""
        self._stop.set()

    # ---- its stages, in order ----------------------------------------------------------------------------------------

    async def collect(self) -> Collected:
        """Scored groups until they make a batch; see `collect.py`."""
        with self.timed("generate"):
            collected = await self.collector.collect()
        self._times["generate"] -= collected.scoring
        self._times["score"] = collected.scoring
        return collected

    def update(self, chosen: StepBatch) -> UpdateResult:
        """Log-probs of the frozen policies, then the optimizer steps."""
        with self.timed("train"):
            trajectories = self.with_log_probs(chosen.trajectories)
            return self.stack.update(
                replace(self.objective, current_version=self.journal.version),
                chosen.updates,
                trajectories,
                lambda done, total: self.observer.progress("train", done, total, "tokens"),
                planned=self.algorithm.updates * self.algorithm.epochs,
            )

    def with_log_probs(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Proximal and reference log-probs, on what is left after selection; with one update a step, its own forward is
        the former."""
        out = list(trajectories)
        if self.plan.recompute_proximal and self.objective.proximal != "first_forward":
            values = self.stack.log_prob(out)
            out = [item.with_(proximal_log_prob=value) for item, value in zip(out, values, strict=True)]
        if self.reference is not None:
            values = self.stack.log_prob(out, self.reference)
            out = [item.with_(reference_log_prob=value) for item, value in zip(out, values, strict=True)]
        return out

    async def publish(self, version: int) -> None:
        """The engine takes the new weights."""
        with self.timed("publish"):
            await self.engine.pause()
            await self.engine.publish(self.policy.model, version)
            await self.engine.resume()

    def finish_step(
        self, step: int, collected: Collected, chosen: StepBatch, result: UpdateResult, record: Mapping[str, Any]
    ) -> None:
        """Files first, then the journal's one transaction: a step that is in the journal has left all its traces."""
        write_rollouts(self.folder.rollout_file(step), step, chosen.groups, chosen.records(result.token_statistics))
        self.folder.append_metrics(record)
        uids = [group.prompt.uid for group in chosen.groups]
        self._cursor, self._surplus = self.source.state(), collected.carried
        self.journal.consume(step, uids, self._cursor, record, version=step)
        self.observer.step(record, _sample(chosen, step))
        self.warn(record, collected, chosen)

    async def evaluate_if_due(self, step: int) -> None:
        if step and self.plan.evaluate_every and step % self.plan.evaluate_every == 0:
            await self.evaluate("after" if step == self.plan.steps else "step")

    async def evaluate(self, label: str) -> None:
        """Held-out questions under the present weights, once a step."""
        step = self.journal.step
        if self.evaluation is not None and not self.evaluated(step):
            record = await self.unless_stopped(self.evaluation.run(step, label, self.now))
            self.folder.append_metrics(record)
            self.observer.evaluated(record)

    def end_if_nothing_is_scored(self, step: int) -> None:
        """A scorer that is down for good would have the run go through all its questions and learn nothing."""
        most = self.plan.max_unscored_steps
        last = [self.journal.metrics(s) or {} for s in range(step - most + 1, step + 1)] if 0 < most <= step else []
        if last and all(
            record.get("completions") and record["reward/invalid"] == record["completions"] for record in last
        ):
            raise NothingScored(
                f"no completion of the last {most} steps has a score ({self._why_unscored}); see to the reward, "
                "then go on with --resume, "
                "or set runtime.max_unscored_steps=0 to go on without"
            )

    def checkpoint_if_due(self, step: int) -> None:
        if self._stop.is_set():
            raise Stopped
        if self.plan.checkpoint_every and step % self.plan.checkpoint_every == 0:
            self.checkpoint(step)

    def checkpoint(self, step: int) -> None:
        """Everything a resume needs, written aside and renamed. The step's checkpoint, if it is there already,
        stays."""
        if step == 0 or read_checkpoint(self.folder.checkpoint(step)) is not None:
            return
        self.observer.progress("checkpoint", 0, 1, "checkpoints")
        facts = {"version": self.journal.version, "cursor": self._cursor, "seed": self.plan.seed}
        facts["pending"] = [group.prompt.uid for group in self._surplus]
        pending = {CARRIED_GROUPS: lambda path: write_groups(path, self._surplus)} if self._surplus else {}
        write_checkpoint(self.folder.checkpoints, step, self.policy.loaded, self.stack, facts, pending)
        best = self.best_step() if self.plan.keep_best else None
        prune(self.folder.checkpoints, self.plan.keep_last, keep=[] if best is None else [best])

    # ---- small things ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the run began, over all resumes."""
        return self.clock.now() - self._began

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = self.clock.now()
        try:
            yield
        finally:
            self._times[stage] = self._times.get(stage, 0.0) + self.clock.now() - start

    async def unless_stopped(self, work: Awaitable[Any]) -> Any:
        """The result of an awaitable, or `Stopped` as soon as the user asks for it, even if the result is there too."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                raise Stopped
            return task.result()
        finally:
            for waiting in (task, stop):
                waiting.cancel()

    def record(self, step: int, collected: Collected, chosen: StepBatch, result: UpdateResult) -> dict[str, Any]:
        """The step's line of metrics.jsonl."""
        rollout = rollout_metrics(collected.generated, chosen)
        seconds = {f"time/{name}": value for name, value in self._times.items()}
        generated, train = self._times.get("generate", 0.0), self._times.get("train", 0.0)
        return {
            "kind": "train",
            "step": step,
            "time": self.now(),
            **rollout,
            **collected.metrics(),
            **mean_metrics(result.metrics),
            "skipped_zero_advantage": float(result.skipped),
            "updates": result.updates,
            "tokens/trained": result.tokens,
            "tokens_per_second/generate": rollout["tokens/generated"] / generated if generated else 0.0,
            "tokens_per_second/train": result.tokens / train if train else 0.0,
            **seconds,
            "policy_version": step,
        }

    def warn(self, record: Mapping[str, Any], collected: Collected, chosen: StepBatch) -> None:
        """Say what a person should know about the step, and what to do."""
        invalid = int(record["reward/invalid"])
        if invalid:
            error = self._why_unscored = errors_of(collected.generated)
            file = self.folder.rollout_file(int(record["step"])).name
            total = int(record["completions"])
            self.observer.warning(
                f"{invalid} of {total} completions have no score ({error}); left out of every mean; see `error` in "
                f"rollouts/{file}"
            )
        for verdict in health({key: value for key, value in record.items() if isinstance(value, int | float)}):
            if verdict.level == "act":
                self.observer.warning(f"step {record['step']}: {verdict.sentence}")
        if not chosen.updates:
            dropped = ", ".join(f"{count} {reason}" for reason, count in chosen.drop_counts.items())
            self.observer.warning(
                f"step {record['step']}: nothing was left to train on ({dropped or 'no groups'}); the weights did "
                "not change"
            )

    def evaluated(self, step: int) -> bool:
        """True when the weights of `step` were evaluated, in this process or before a resume."""
        return any(r["kind"] == "eval" and r["step"] == step for r in self.folder.read_metrics())

    def best_step(self) -> int | None:
        """The checkpointed step with the best held-out accuracy; the earliest of equals."""
        held = {checkpoint.step for checkpoint in checkpoints(self.folder.checkpoints)}
        evals = [r for r in self.folder.read_metrics() if r["kind"] == "eval" and r["step"] in held]
        found = [(r["accuracy"], -r["step"]) for r in evals if r.get("accuracy") is not None]
        return -max(found)[1] if found else None


def _sample(chosen: StepBatch, step: int) -> Sample | None:
    """One completion for people to look at: another prompt each step."""
    if not chosen.groups:
        return None
    group = chosen.groups[step % len(chosen.groups)]
    completion, score = group.completions[0], group.scores[0]
    return Sample(
        question=group.prompt.question,
        text=completion.text,
        answer=group.prompt.answer,
        reward=score.value if score.valid else None,
        correct=score.correct,
        parts=score.parts,
    )
