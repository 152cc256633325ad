"""The loop of RL. `Controller.train`, read from top to bottom, is the method.

    task → engine → reward → advantage → selection → pack → model → surrogate → aggregate → step → publish

A deterministic state machine: the state of each prompt is in the journal before anyone acts on it, and all times come
from the injected clock. The collector decides whether training is synchronous: `BatchCollector` enqueues a step's
prompts only after the previous step's weights are published, `AsyncCollector` generates during training. Long
computations run in a thread beside the event loop, which keeps serving engine, rewards and Ctrl-C.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from proxima.config.schema import RunConfig
from proxima.config.sections.data import role_metric_names
from proxima.core.correction.guard import MismatchError
from proxima.engine.protocol import Health
from proxima.evaluation.headline import named_metric
from proxima.evaluation.held_out import Evaluation, summarise, summary_by_source
from proxima.rollout.collector import BatchNotFilled, CollectedBatch, Collector
from proxima.runtime.loop.device_figures import device_figures, memory_figures, per_second
from proxima.runtime.loop.publisher import Publisher, engine_errors
from proxima.runtime.loop.step_review import StepReview, mean_metrics, metrics_by_source, not_filled, rollout_metrics
from proxima.runtime.loop.training_loop import RunEnded, RunServices, TrainingLoop
from proxima.runtime.state.pending_files import write_groups
from proxima.task.mix import sources_of
from proxima.training.batch_builder import BatchBuilder, TrainingBatch
from proxima.training.checkpoint import CARRIED_GROUPS, CRITIC, VALUE_HEAD, write_tensors
from proxima.training.learner import Learner
from proxima.training.stack import UpdateResult


class Controller(TrainingLoop):
    """The loop of an RL run, with everything that it uses.

    Args:
        config, services: see `TrainingLoop`.
        collector: turns prompts into the scored groups of a step, with engine and rewards; or reads the groups that
            another run stored, without engine and rewards if there are no held-out questions.
        batch_builder: turns scored groups into updates.
        learner: holds the weights and updates them.
        publisher: sends the weights to the engine.
        evaluations: the held-out sets by name. The first is that of `eval.task`, with an empty name; may be empty.
    """

    config: RunConfig

    def __init__(
        self,
        config: RunConfig,
        collector: Collector,
        batch_builder: BatchBuilder,
        learner: Learner,
        publisher: Publisher,
        evaluations: Mapping[str, Evaluation],
        services: RunServices,
    ) -> None:
        super().__init__(config, config.train.steps, learner.stack, services)
        if learner.critic is not None:
            self.others = {CRITIC: learner.critic.stack}
        self.collector = collector
        self.generator = collector.generator
        self.batch_builder = batch_builder
        self.learner = learner
        self.publisher = publisher
        self.evaluations = evaluations
        self.review = StepReview(services, learner, config.max_unscored_steps, batch_builder.selection)
        # All three are of the last finished step: prompts of a discarded step are drawn again.
        self._cursor = collector.state()
        self._pending = collector.pending()
        self._stage_files = learner.files(self._pending)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        await self.start()
        await self.evaluate_first()
        while self.steps_left:
            with self.next_step() as step:
                collected = await self.collect(step)  # prompts: queued → generating → scored
                batch = await self.build_batch(step, collected)  # scored → selected | dropped
                result = await self.update(batch, collected)
                version = await self.publish(result)
            record = await self.finish_step(step, version, collected, batch, result)  # → consumed
            await self.evaluate_if_due(step)
            await self.checkpoint_if_due(step)
            self.review.stop_if_unscored(record)
        await self.evaluate_last()
        self.end_if_untrained()

    # ---- its stages, in order ----------------------------------------------------------------------------------------

    async def collect(self, step: int) -> CollectedBatch:
        """Collect scored groups until they make a batch."""
        self.publisher.reports.metrics.clear()
        with self.timed(self.collector.stage), engine_errors():
            collecting = self.collector.collect(self.journal.version, self.journal.history)
            try:
                collected: CollectedBatch = await self.cancel_on_stop(collecting)
            except BatchNotFilled as shortfall:
                raise await self.not_filled(step, shortfall) from shortfall
        return collected

    async def build_batch(self, step: int, collected: CollectedBatch) -> TrainingBatch:
        """Compute advantages, selection and the order of the updates, then the columns that the update needs. The
        trainer has the devices from here until `publish`."""
        await self.publisher.turns.release_devices()
        batch = await self.compute.run(self.batch_builder.step_batch, collected.groups, step, collected.dropped)
        with self.timed("train"):
            batch = await self.learner.prepare(batch, collected.version)
        await self.disk.write(self.journal.select, step, batch.kept, batch.dropped)
        return batch

    async def update(self, batch: TrainingBatch, collected: CollectedBatch) -> UpdateResult:
        """Compute log-probs of the frozen policies, then make the optimizer steps, without blocking the event loop.

        Raises:
            RunEnded: engine and trainer differ too much on fresh tokens (`MismatchError`); the policy is not updated.
        """
        self.step_complete = False
        generates = self.collector.stage == "generate"  # a replay reads what another run generated
        update = partial(self.learner.update, batch, collected.version, own=generates)
        with self.timed("train"):
            try:
                return await self.computed("train", update)
            except MismatchError as error:  # the weights are those of the step before, but for a critic of its own
                self.step_complete = self.learner.critic is None
                raise RunEnded(f"step {self.journal.step + 1}, before its update: {error}") from error

    async def publish(self, result: UpdateResult) -> int:
        """Give the engine the new weights, if there are any. Returns the version after the step."""
        if not result.updates:
            await self.publisher.turns.resume()
            return self.journal.version
        version = self.journal.version + 1
        with self.timed("publish"):
            await self.publisher.publish(version, self.journal.step + 1, deferring=True)
        return version

    async def finish_step(
        self, step: int, version: int, collected: CollectedBatch, batch: TrainingBatch, result: UpdateResult
    ) -> Mapping[str, Any]:
        """Write the files, then commit the step to the journal in one transaction, so that every step in the journal
        has all its files. Returns the step's line of metrics.jsonl."""
        await self.publisher.check_health(step)
        record = self.record(step, version, collected, batch, result)
        with self.activity.stage("write", step=step):
            outcomes = batch.records(result.token_statistics)
            await self.write_aside(self.store.write_rollouts, step, batch.groups, outcomes)
            await self.disk.write(self.store.append_metrics, record)
            self.batch_builder = self.batch_builder.after(batch)
            self.learner = self.learner.after(result.metrics)
            self.collector.judged(batch.judgements)
            # Snapshot atomically; prompts enqueued later are redrawn on resume.
            self._cursor = self.collector.state()
            self._pending = self.collector.pending()
            self._stage_files = self.learner.files(self._pending)
            consume = partial(self.journal.consume, version=version)
            await self.disk.write(consume, step, self._cursor, record)
            self.report_step(record)
            self.review.warn(record, collected, batch)
        self.step_complete = True
        self.publisher.end_if_failed()
        return record

    async def evaluate(self, label: str) -> None:
        step = self.journal.step
        start = self.now()
        if not self.evaluations or self.journal.was_evaluated(step):
            return
        figures: dict[str, Any] = {}
        with engine_errors(), self.activity.stage("evaluate", step=step):
            for name, held_out in self.evaluations.items():
                figures |= await self.evaluate_set(name, held_out, label)
        record = self.evaluation_record(label, start)
        record["time/score"] = self.evaluations[""].generator.scoring_seconds
        record |= figures
        metric = self.config.eval.metric
        if metric:
            optional = role_metric_names(self.config.eval.task)
            record["metric"], problem = named_metric(record, metric, optional=optional)
            if problem and step == 0:  # nothing is lost yet
                raise RunEnded(problem)
            if problem:
                self.observer.warning(problem)
        await self.keep_evaluation(record)

    async def evaluate_set(self, name: str, held_out: Evaluation, label: str) -> dict[str, Any]:
        """Evaluate on one set, and write its completions. Returns its figures by their names in the record."""
        groups = await self.cancel_on_stop(held_out.groups())
        file_label = f"{label}-{name}" if name else label
        await self.write_aside(self.store.write_evals, self.journal.step, file_label, groups, held_out.sources)
        figures = summarise(groups) | summary_by_source(held_out.sources, groups)
        if not name:
            return figures
        return {f"{name}/{key}": value for key, value in figures.items()}

    # ---- what the stages need ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Report the restored groups and prompts, and publish the initial weights; nothing is lost if the engine can't
        take them."""
        for group in self._pending.groups:
            self.activity.scored(group.prompt.uid)
        self.activity.enqueued(prompt.uid for prompt in self._pending.prompts)
        with self.activity.stage("publish"):
            await self.publisher.publish(self.journal.version, self.journal.step, deferring=False)
        self.publisher.end_if_failed()

    def checkpoint_contents(self) -> tuple[dict[str, Any], dict[str, Callable[[Path], None]]]:
        facts = {"cursor": self._cursor}
        facts |= self._pending.facts()
        facts |= self.batch_builder.state()
        facts |= self.learner.state()
        files = dict(self._stage_files)
        if self._pending.groups:
            files[CARRIED_GROUPS] = lambda path: write_groups(path, self._pending.groups)
        head = self.learner.policy.value_head
        if head is not None:
            files[VALUE_HEAD] = lambda path: write_tensors(path, head.state_dict())
        return facts, files

    async def not_filled(self, step: int, shortfall: BatchNotFilled) -> RunEnded:
        """Write the completions of a step that filled no batch; returns the error that ends the run."""
        unused = self.batch_builder.step_batch((), step, shortfall.dropped)
        await self.disk.write(self.store.write_rollouts, step, unused.groups, unused.records({}))
        return not_filled(shortfall, step, self.folder.rollout_file(step).name, self.batch_builder.selection)

    def record(
        self, step: int, version: int, collected: CollectedBatch, batch: TrainingBatch, result: UpdateResult
    ) -> dict[str, Any]:
        """The step's line of metrics.jsonl."""
        stage = self.collector.stage
        times = dict(self.times)
        times[stage] -= collected.scoring_seconds
        times["score"] = collected.scoring_seconds
        rollout = rollout_metrics(collected.generated, batch)
        generated = rollout["tokens/generated"]
        rollout |= metrics_by_source(sources_of(self.config.task), collected.generated, batch)
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
            "tokens_per_second/generate": per_second(generated, times.get("generate", 0.0)),
            "tokens_per_second/train": per_second(result.tokens, times["train"]),
            **self.collector.step_metrics(times),
            **self.publisher.reports.metrics,
            **{f"time/{name}": value for name, value in times.items()},
            **device_figures(result, self.stack, self.config.placement, generated, times["step"]),
            **memory_figures(result, self.planned_memory),
            "policy_version": version,
        }

    def why_untrained(self, record: Mapping[str, Any]) -> str:
        return self.review.exhausted or super().why_untrained(record)

    def on_health(self, health: Health) -> None:
        self.publisher.report_health(health, min(self.journal.step + 1, self.steps))
