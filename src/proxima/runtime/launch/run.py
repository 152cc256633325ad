"""A run of RL from its config: what `proxima train` calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from proxima.config.estimate import at_once, pruned
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.rollout.collector import Pending
from proxima.runtime.launch.build import StageFactory, describe_model, load_model, make_controller
from proxima.runtime.launch.build_critic import check_critic_tokens, make_critic
from proxima.runtime.launch.execution import RunOptions, execute
from proxima.runtime.launch.inputs import check_replayed_rewards, input_hashes
from proxima.runtime.launch.run_data import load_run_data
from proxima.runtime.loop.controller import Controller
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.pending_files import CARRIED_GROUPS, NEXT_POLICY, read_groups, read_next_policy
from proxima.runtime.state.replay import StoredRollouts, rollouts_sha
from proxima.runtime.state.store import RunStore
from proxima.runtime.state.summary import Summary, algorithm_name
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, RunInfo
from proxima.train.checkpoint import Checkpoint
from proxima.train.next_policy import NextLogProbs

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


def train(config: "RunConfig", *, stages: StageFactory | None = None, **how: Unpack[RunOptions]) -> Summary:
    """Train as the config says; all results are in the run folder.

    Args:
        stages: from the trained policy to forward stages beside those of the loss, such as a critic for `gae`. They
            must be the same at each resume.
        how: the rest, and what is raised: see `execute`.
    """
    return execute(lambda: Reinforcement(config, stages), config, **how)


class Reinforcement:
    """The `Workload` of `proxima train`."""

    def __init__(self, config: "RunConfig", stages: StageFactory | None = None) -> None:
        self.config, self.stages = config, stages
        check_critic_tokens(config)
        self.data = load_run_data(config)
        check_replayed_rewards(config)
        self.notes = self.data.notes
        self.pending = Pending()
        self.next_log_probs: list[NextLogProbs] = []
        self.kl_coefficient: float | None = None
        self.restored: Path | None = None

    @property
    def steps(self) -> int:
        return self.config.train.steps

    def hashes(self) -> dict[str, str]:
        return input_hashes(self.config, self.data.source, self.data.held_out_rows)

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        self.restored = checkpoint.path
        source, facts = self.data.source, checkpoint.facts
        source.load(facts["cursor"])
        groups = read_groups(checkpoint.path / CARRIED_GROUPS, facts.get("pending", []))
        in_flight = [] if isinstance(source, StoredRollouts) else source.again(facts.get("in_flight", []))
        self.pending = pending = Pending.of(facts, groups, in_flight)
        prompts = [*(group.prompt for group in groups), *in_flight]
        journal.enqueue([p for p in prompts if journal.prompt(p.uid) is None], size=len(source.rows))  # lost
        journal.generating(prompt.uid for prompt in prompts)  # the rewind has queued them
        journal.scored(group for group in groups if group.prompt.uid not in pending.unjudged)
        self.kl_coefficient = facts.get("kl_coefficient")
        self.next_log_probs = read_next_policy(checkpoint.path / NEXT_POLICY)

    def load(self, path: str | None) -> LoadedModel:
        return load_model(self.config, path)

    def make_loop(
        self, loaded: LoadedModel, store: RunStore, compute: ComputeThread, observer: Observer, clock: Clock
    ) -> Controller:
        views: dict[str, Any] = {"observer": observer, "clock": clock}
        critic = compute.call(make_critic, self.config, loaded, self.restored)
        more: dict[str, Any] = {"stages": self.stages, "critic": critic}
        kept: dict[str, Any] = {"pending": self.pending, "kl_coefficient": self.kl_coefficient}
        kept["next_log_probs"] = self.next_log_probs
        return make_controller(self.config, loaded, self.data, store, compute, **more, **views, **kept)

    def info(self, loaded: LoadedModel, folder: Path, step: int) -> RunInfo:
        config, train = self.config, self.config.train
        prompts, kept = pruned(train.prompts_per_step, train.completions_per_prompt, config.algorithm.selection)
        return RunInfo(
            **describe_model(config, loaded),
            algorithm=algorithm_name(config),
            folder=folder,
            steps=train.steps,
            resumed_at=step,
            prompts=prompts,
            completions=train.completions_per_prompt,
            kept=kept,
            at_once=at_once(prompts, config.algorithm.dynamic_sampling),
            updates=train.updates_per_step * train.epochs_per_step,
            replay_of=config.replayed,
        )

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        replayed = self.config.replayed
        sha = rollouts_sha(journal.get("inputs") or {})
        replay = None if replayed is None else {"run": str(replayed), "sha256": sha}
        return {"algorithm": algorithm_name(self.config), "replay": replay}

    def close(self) -> None:
        if isinstance(self.data.source, StoredRollouts):
            self.data.source.close()
