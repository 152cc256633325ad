"""The workload of training on a fixed data set, built from a config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxima.config.describe import class_at
from proxima.config.families import Family
from proxima.config.outcomes import AUTO, Outcome, attention_outcome, unanswered
from proxima.config.sections.offline import OfflineConfig, SampledEvalConfig
from proxima.data import FieldError
from proxima.data.errors import counted
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.model.proof import proof_of
from proxima.runtime.launch.learning import make_stack
from proxima.runtime.loop.offline_loop import HeldOutSamples, OfflineData, OfflineLoop
from proxima.runtime.loop.training_loop import RunServices
from proxima.runtime.placement.follower import RankModels
from proxima.runtime.resume.changes import model_hashes, rows_sha
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.summary import run_info
from proxima.runtime.watch.observer import Observer, RunInfo
from proxima.system.machine import set_compute_threads
from proxima.task.prompts import key_notes
from proxima.training.checkpoint import Checkpoint
from proxima.training.offline.method import OfflineMethod
from proxima.training.ranks import Ranks

OTHER_ROWS = "raise eval.limit, or name other rows in eval.task"


class OfflineWorkload:
    """The `Workload` of the families that train on a fixed data set."""

    def __init__(self, config: OfflineConfig, family: Family, observer: Observer) -> None:
        set_compute_threads(config.runtime.threads)
        self.config = config
        self.family = family
        self.chosen: list[Outcome] = []
        run = Path(config.folder) if config.folder else None
        model = config.model.unloaded([config.task, config.eval.task], run)
        self.context = model.context
        self.images = model.images
        source = replace(config.model.source(config.seed, config.placement), images=model.images)
        self.method: OfflineMethod[Any] = class_at(family.method)(config, source, model.tokenizer, model.context)
        self.method.check()
        self.data = OfflineData(config, self.method, observer)
        self.steps = config.train.steps_of(len(self.data.items))
        self.notes = [*config.data.template_notes(model, self.data.rows["task: its rows"]), *self.data.notes]
        for name, opened in self.data.rows.items():
            task = name.partition(":")[0]
            self.notes += key_notes(task, opened, model.tokenizer, config.data.template_arguments)
        why = self.method.unmeasured(self.data.held_out) if self.data.held_out else ""
        if why and config.checkpoint.keep_best:
            reason = f"has no metric to compare checkpoints by: {why}"
            raise FieldError("checkpoint.keep_best", True, reason, remedy=OTHER_ROWS)
        if why:
            self.notes.append(f"{why}; {OTHER_ROWS}")

    @property
    def has_held_out(self) -> bool:
        return bool(self.data.held_out)

    def hashes(self) -> dict[str, str]:
        of_rows = {name: rows_sha(rows) for name, rows in self.data.rows.items()}
        return model_hashes(self.config.model) | of_rows

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        self.data.cursor.load(checkpoint.facts["cursor"])

    def load(self, path: str | None) -> LoadedModel:
        return self.method.load(path)

    def make_loop(self, loaded: LoadedModel, services: RunServices) -> OfflineLoop:
        config = self.config
        if self.images is not None:
            self.images.keep_in(services.store.folder.images)
        self.notes += self.method.notes(loaded)
        stack = make_stack(config.train, self.method.model(loaded), self.steps, services.store.ranks)
        if config.model.attention == AUTO:
            model = stack.model
            proof = proof_of(model.model)
            self.chosen.append(attention_outcome(config.model, proof, model.attention, model.device))
        samples = None
        prompts = self.method.prompts(self.data.samples) if self.data.samples else ()
        if prompts:
            assert isinstance(config.eval, SampledEvalConfig)
            tokens = config.eval.sample_tokens
            samples = HeldOutSamples(prompts, stack, services.compute, max_tokens=tokens, max_length=self.context)
        return OfflineLoop(config, stack, self.method, self.data, samples, services)

    def rank_models(
        self, loaded: LoadedModel, compute: ComputeThread, ranks: Ranks, checkpoint: Path | None
    ) -> RankModels:
        stack = make_stack(self.config.train, self.method.model(loaded), self.steps, ranks)
        return RankModels(stacks={stack.name: stack}, late_stages=self.method.stages)

    def info(self, loaded: LoadedModel | None, folder: Path, finished: int) -> RunInfo:
        config = self.config
        return run_info(
            config,
            loaded,
            folder,
            algorithm=self.family.name,
            step=counted(config.train.examples_per_step, "example"),
            steps=self.steps,
            finished=finished,
            rows={name.partition(":")[0]: rows for name, rows in self.data.rows.items()},
            chosen=[*self.chosen, *unanswered(config, self.chosen)],
        )

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        return {"algorithm": self.family.name}

    def close(self) -> None:
        """Do nothing: nothing is open."""
