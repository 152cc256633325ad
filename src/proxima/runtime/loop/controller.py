"""The loop. Read `Controller.train` top to bottom and you have read the method.

    task → engine → reward → advantage → selection → pack → model → surrogate → aggregate → step → publish

A deterministic state machine: the state of each prompt is in the journal before anyone acts on it, and all times are of
the injected clock. The collector decides whether training is synchronous: `BatchCollector` admits no prompt for a step
before the weights of the step before it are published, `AsyncCollector` generates during training. What takes long
runs in a thread beside the event loop, so that engine, rewards and Ctrl-C are served.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from proxima.core.correction import MismatchError, health
from proxima.data import UserError
from proxima.engine.executor import HookError
from proxima.engine.protocol import Health, WeightUpdate, close_engine
from proxima.evaluate.held_out import Evaluation, named_metric, summarise
from proxima.rollout.collector import BatchNotFilled, CollectedBatch, Collector, score_errors
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.loop.step_metrics import mean_metrics, rollout_metrics
from proxima.runtime.loop.training_loop import Plan, RunEnded, Trained, TrainingLoop
from proxima.runtime.state.carried_groups import CARRIED_GROUPS, write_groups
from proxima.runtime.state.replay import StoredRollouts
from proxima.runtime.state.store import RunStore
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.engine_watch import RESUME, EngineWatch, engine_errors
from proxima.runtime.watch.observer import Observer, Sample
from proxima.train import UpdateResult
from proxima.train.batch_builder import BatchBuilder, TrainingBatch
from proxima.train.checkpoint import CRITIC, VALUE_HEAD, write_tensors
from proxima.train.learner import Learner

RESUME_CHANGED = "resume (--resume, with --accept-changes where its file or fields have changed)"


class Controller(TrainingLoop):
    """Everything that the loop touches, and the loop.

    Args:
        plan, store, observer, clock: see `TrainingLoop`.
        collector: from prompts to the scored groups of a step, with the engine and the rewards; or the groups that
            another run stored, without them where no question is held out.
        batch_builder: from scored groups to updates.
        learner: the weights, and what changes them.
        evaluation: the held-out questions; None: there are none.
    """

    def __init__(
        self,
        plan: Plan,
        collector: Collector,
        batch_builder: BatchBuilder,
        learner: Learner,
        store: RunStore,
        evaluation: Evaluation | None,
        observer: Observer,
        clock: Clock,
    ) -> None:
        others = {} if learner.critic is None else {CRITIC: learner.critic.stack}
        trained = Trained(loaded=learner.policy.loaded, stack=learner.stack, compute=learner.compute, others=others)
        super().__init__(plan, trained, store, observer, clock)
        self.collector, self.batch_builder = collector, batch_builder
        self.learner, self.evaluation = learner, evaluation
        self._score_error = self._accuracy_warning = ""
        self.watch = EngineWatch(store.folder.engine_log.name)
        self._unpublished: RunEnded | None = None
        # Both are those of the last finished step: prompts of a discarded step are drawn again.
        self._cursor, self._pending = collector.state(), collector.pending()
        self._stage_files = learner.files(self._pending)
        for group in self._pending.groups:
            self.activity.scored(group.prompt.uid)
        self.activity.admitted(prompt.uid for prompt in self._pending.prompts)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """All steps and evaluations that the run still lacks."""
        with self.activity.stage("publish"):
            await self.publish(self.journal.version)
        self.end_if_not_published()
        if self.journal.step == 0 and self.plan.evaluate_before:
            await self.evaluate("before")
        await self.evaluate_if_due(self.journal.step)  # an interrupted run may have missed it
        while self.steps_left:
            step = self.journal.step + 1
            self._times, cpu = {}, self.clock.cpu()
            self.watch.begin_step()
            with self.timed("step", step=step):
                collected = await self.collect(step)  # queued → generating → scored
                batch = await self.learner.compute.run(
                    self.batch_builder.step_batch, collected.groups, step, collected.dropped
                )
                with self.timed("train"):
                    batch = await self.learner.prepare(batch, collected.version)
                await self.disk.write(
                    self.journal.select, step, batch.kept, batch.dropped
                )  # scored → selected | dropped
                self.whole = False
                result = await self.update(batch, collected.version)
                version = self.journal.version
                if result.updates:  # without one, there are no new weights
                    version += 1
                    with self.timed("publish"):
                        await self.publish(version)
            self._times["cpu"] = self.clock.cpu() - cpu
            if self.generator is not None and self._unpublished is None:
                self.on_health(await self.generator.engine.health())
            record = self.record(step, version, collected, batch, result)
            with self.activity.stage("write", step=step):
                await self.finish_step(
                    record, collected, batch, result
                )  # selected | dropped → consumed: the step is done
            self.whole = True
            self.end_if_not_published()
            await self.evaluate_if_due(step)
            await self.checkpoint_if_due(step)
            self.end_if_unscored(step)
            self.end_if_mismatched(record)
        if self.plan.evaluate_after:
            await self.evaluate("after")

    # ---- its stages, in order ----------------------------------------------------------------------------------------

    async def collect(self, step: int) -> CollectedBatch:
        """Scored groups until they make a batch."""
        stage = "read" if isinstance(self.collector, StoredRollouts) else "generate"
        with self.timed(stage):
            try:
                with engine_errors():
                    collected: CollectedBatch = await self.unless_stopped(
                        self.collector.collect(self.journal.version, self.store.history)
                    )
            except BatchNotFilled as shortfall:
                file = self.folder.rollout_file(step)
                nothing = self.batch_builder.step_batch((), step, shortfall.dropped)
                await self.disk.write(self.store.write_rollouts, step, nothing.groups, nothing.records({}))
                remedy = (
                    f"Fix the reward and {RESUME_CHANGED}"
                    if shortfall.unscored
                    else "Start another run with easier or harder questions or more completions per prompt, or resume "
                    "this one (--resume) with a higher algorithm.dynamic_sampling.max_num_gen_batches or "
                    "algorithm.dynamic_sampling.exhausted=partial"
                )
                raise RunEnded(f"step {step}: {shortfall}; see rollouts/{file.name}. {remedy}") from shortfall
        if not self._accuracy_warning:
            self._accuracy_warning = self.batch_builder.missing_accuracy_warning(collected.generated)
            if self._accuracy_warning:
                self.observer.warning(self._accuracy_warning)
        self.activity.taken(group.prompt.uid for group in collected.groups)
        self.activity.taken(group.prompt.uid for group, _ in collected.dropped)
        self._times[stage] -= collected.scoring_seconds
        self._times["score"] = collected.scoring_seconds
        return collected

    async def update(self, batch: TrainingBatch, version: int) -> UpdateResult:
        """Log-probs of the frozen policies, then the optimizer steps, beside the event loop."""
        own = not isinstance(self.collector, StoredRollouts)
        with self.timed("train"):
            try:
                return await self.computed("train", partial(self.learner.update, batch, version, own=own))
            except MismatchError as error:  # the weights are those of the step before, but for a critic of its own
                self.whole = self.learner.critic is None
                raise RunEnded(f"step {self.journal.step + 1}, before its update: {error}") from error

    async def publish(self, version: int) -> None:
        """The engine, if there is one, gets the weights. Where it can't take them, or a hook raises, the run ends when
        the step is whole."""
        if (generator := self.collector.generator) is None:
            return
        engine, where = generator.engine, f"after step {self.journal.step + (not self.whole)}"
        try:
            with engine_errors():
                await engine.pause()
                generator.newest = version
                await engine.publish(WeightUpdate(version=version, module=self.learner.policy.model))
                await engine.resume()
        except HookError as error:
            for _, problem in error.failures:
                if isinstance(problem, UserError):
                    raise problem from error
            self._unpublished = RunEnded(f"{where}: {error}; repair or remove the hook and resume (--resume)")
            self._unpublished.__cause__ = error
        except UserError as error:
            if self.whole:  # before the first step of this process: nothing is lost
                raise
            resume = "" if "--resume" in error.remedy else f"; {RESUME}"
            self._unpublished = RunEnded(f"{where}: {error}{resume}")
            self._unpublished.__cause__ = error
        else:
            self.activity.published(version)
            if found := await self.watch.published(engine, version):
                self.observer.synced(found)

    @property
    def generator(self) -> GroupGenerator | None:
        return self.collector.generator

    def close(self) -> None:
        """End what is being generated, the workers of the rewards, and the engine's process if it has one."""
        self.collector.abandon()
        self.learner.close()
        generators = [self.collector.generator] if self.collector.generator is not None else []
        generators += [one.generator for one in self.evaluation.others.values()] if self.evaluation else []
        for generator in generators:
            generator.rewards.close()
            close_engine(generator.engine)

    async def finish_step(
        self, record: Mapping[str, Any], collected: CollectedBatch, batch: TrainingBatch, result: UpdateResult
    ) -> None:
        """Files first, then the journal's one transaction: a step in the journal has left all its traces."""
        step, outcomes = record["step"], batch.records(result.token_statistics)
        await self.write_aside(self.store.write_rollouts, step, batch.groups, outcomes)
        await self.disk.write(self.folder.append_metrics, record)
        self.batch_builder = self.batch_builder.after(batch)
        uids = [group.prompt.uid for group in batch.groups]
        # of one instant: what is admitted after it is admitted after the step, and a resume draws it again
        self._cursor, self._pending = self.collector.state(), self.collector.pending()
        self._stage_files = self.learner.files(self._pending)
        consume = partial(self.journal.consume, version=record["policy_version"])
        await self.disk.write(consume, step, uids, self._cursor, record)
        self.observer.step(record, _sample(batch, step))
        self.warn(record, collected, batch)

    async def evaluate(self, label: str) -> None:
        """Held-out questions under the present weights, once per step."""
        step, start = self.journal.step, self.now()
        if self.evaluation is None or self.store.evaluated(step):
            return
        others: dict[str, Any] = {}
        with engine_errors(), self.activity.stage("evaluate", step=step):
            groups = await self.unless_stopped(self.evaluation.groups())
            await self.write_aside(self.store.write_evals, step, label, groups)
            for name, held_out in self.evaluation.others.items():
                answered = await self.unless_stopped(held_out.groups())
                await self.write_aside(self.store.write_evals, step, f"{label}-{name}", answered)
                others |= {f"{name}/{key}": value for key, value in summarise(answered).items()}
        record = {
            "kind": "eval",
            "step": step,
            "label": label,
            "time": self.now(),
            "time/evaluate": self.now() - start,
            "time/score": self.evaluation.generator.scoring_seconds,
            **summarise(groups),
            **others,
        }
        if self.plan.metric:
            record["metric"], problem = named_metric(record, self.plan.metric)
            if problem and step == 0:  # nothing is lost yet
                raise RunEnded(problem)
            if problem:
                self.observer.warning(problem)
        await self.keep_evaluation(record)

    def checkpoint_contents(self) -> tuple[dict[str, Any], dict[str, Callable[[Path], None]]]:
        facts = {"cursor": self._cursor, **self._pending.facts(), **self.batch_builder.state()}
        files = {**self._stage_files}
        if self._pending.groups:
            files[CARRIED_GROUPS] = lambda path: write_groups(path, self._pending.groups)
        if (head := self.learner.policy.value_head) is not None:
            files[VALUE_HEAD] = lambda path: write_tensors(path, head.state_dict())
        return facts, files

    def on_health(self, health: Health) -> None:
        """Warn about engine processes and servers that died or returned."""
        step = min(self.journal.step + 1, self.plan.steps)
        for text in self.watch.news(health):
            self.observer.warning(f"step {step}: {text}")

    def end_if_unscored(self, step: int) -> None:
        """A reward that always fails would let the run use up all its questions and learn nothing."""
        limit = self.plan.max_unscored_steps
        records = (
            [self.journal.metrics(s) or {} for s in range(step - limit + 1, step + 1)] if 0 < limit <= step else []
        )
        if records and all(r.get("completions") and r["reward/invalid"] == r["completions"] for r in records):
            raise RunEnded(
                f"no completion of the last {limit} steps has a score ({self._score_error}); fix the reward and "
                f"{RESUME_CHANGED}, or set runtime.max_unscored_steps=0 to train without scores"
            )

    def _unscored_note(self, record: Mapping[str, Any]) -> str:
        """When a run without scores ends."""
        limit = self.plan.max_unscored_steps
        if not limit or record["reward/invalid"] < record["completions"]:
            return ""
        return f". The run ends after {limit} such steps in a row (runtime.max_unscored_steps)"

    def end_if_not_published(self) -> None:
        """The step is in the journal, so that its checkpoint fits its weights."""
        if self._unpublished is not None:
            raise self._unpublished

    def end_if_mismatched(self, record: Mapping[str, Any]) -> None:
        """`algorithm.mismatch.on_mismatch: stop`."""
        guard = self.learner.guard
        if guard.on_mismatch == "stop" and (excess := guard.exceeded(record)):
            raise RunEnded(
                f"step {record['step']}: {excess}: engine and trainer differ too much; the documentation of the "
                "mismatch lists causes. Fix it and resume, or resume with algorithm.mismatch.on_mismatch=reject or warn"
            )

    # ---- small things ------------------------------------------------------------------------------------------------

    def record(
        self, step: int, version: int, collected: CollectedBatch, batch: TrainingBatch, result: UpdateResult
    ) -> dict[str, Any]:
        """The step's line of metrics.jsonl."""
        rollout = rollout_metrics(collected.generated, batch)
        seconds = {f"time/{name}": value for name, value in self._times.items()}
        generating, training = self._times.get("generate", 0.0), self._times.get("train", 0.0)
        return {
            "kind": "train",
            "step": step,
            "time": self.now(),
            **rollout,
            **collected.metrics(),
            **batch.metrics,
            **mean_metrics(result.metrics),
            **self.learner.stage_metrics(),
            "skipped_zero_advantage": float(result.skipped),
            "updates": result.updates,
            "tokens/trained": result.tokens,
            "tokens_per_second/generate": rollout["tokens/generated"] / generating if generating else 0.0,
            "tokens_per_second/train": result.tokens / training if training else 0.0,
            **self.collector.step_metrics(self._times),
            **self.watch.metrics,
            **seconds,
            "policy_version": version,
        }

    def warn(self, record: Mapping[str, Any], collected: CollectedBatch, batch: TrainingBatch) -> None:
        """Tell the user what matters about the step, and what to do."""
        step, invalid = record["step"], record["reward/invalid"]
        for note in (*collected.notes, *self.learner.warnings()):
            self.observer.warning(f"step {step}: {note}")
        if invalid:
            self._score_error = score_errors(collected.generated)
            few = f"{invalid} of {record['completions']} completions have no score"
            lead = f"step {step}: no completion has a score" if invalid == record["completions"] else few
            self.observer.warning(
                f"{lead} ({self._score_error}); they count in no mean; see `error` in "
                f"rollouts/{self.folder.rollout_file(step).name}{self._unscored_note(record)}"
            )
        for verdict in health(record, self.learner.guard):
            if verdict.level == "act":
                self.observer.lasting(f"step {step}: {verdict.sentence}")
        if not batch.updates:
            dropped = ", ".join(f"{count} {reason}" for reason, count in batch.drop_counts.items())
            self.observer.warning(
                f"step {step}: nothing was left to train on ({dropped or 'no groups'}); the weights did not change"
            )


def _sample(batch: TrainingBatch, step: int) -> Sample | None:
    """One completion for people to look at: of another prompt each step."""
    if not batch.groups:
        return None
    group = batch.groups[step % len(batch.groups)]
    completion, score = group.completions[0], group.scores[0]
    return Sample(
        question=group.prompt.question,
        text=completion.text,
        answer=group.prompt.answer,
        reward=score.value if score.valid else None,
        correct=score.correct,
        parts=score.parts,
    )
