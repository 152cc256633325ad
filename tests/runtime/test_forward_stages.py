"""Forward passes before the advantages and before the update, of a value head in place of those of the config."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from proxima.config import resolve
from proxima.core.advantage.token import Gae
from proxima.data import Trajectory
from proxima.model import Policy
from proxima.model.attention import ATTENTION
from proxima.runtime.launch.run import train
from tests.runtime.interruptions import interrupt_and_resume
from tests.runtime.tiny_run import NO_EVAL, assert_same, go, recipe, rollouts_of, traces


@dataclass
class ValueStage:
    """A linear value head over the policy's last hidden states; keeps what it was given."""

    policy: Policy
    column: str = "value"
    packed: list[Trajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.head = nn.Linear(self.policy.model.config.hidden_size, 1)

    def pack(self, trajectories):
        self.packed += trajectories
        return self.policy.pack(trajectories)

    def __call__(self, batch):
        hidden = ATTENTION[self.policy.attention](self.policy.backbone, batch)
        return self.head(hidden.float()).squeeze(1)


@pytest.fixture
def trained_with(monkeypatch):
    """Has runs take the stages that a function of the policy makes."""

    def take(stages):
        monkeypatch.setattr("proxima.runtime.launch.learning.needs_stages", lambda config: True)
        made = "proxima.runtime.launch.forward_passes.make_stages"
        monkeypatch.setattr(made, lambda config, source, policy, *rest, **how: stages(policy))

    return take


def gae_run(folder, model, **how):
    tree = recipe(model, algorithm={"preset": "grpo"}, train__updates_per_step=2, train__steps=2, **NO_EVAL)
    config = resolve({**tree, "folder": str(folder)}).config
    advantage = Gae(gamma=0.9, lam=0.8, whiten=False)
    config = replace(config, algorithm=replace(config.algorithm, advantage=advantage))
    return train(config, **how)


def test_a_run_with_a_stage_is_resumed_to_the_bit(tiny_model, tmp_path, trained_with):
    trained_with(lambda policy: [ValueStage(policy)])
    gae_run(tmp_path / "whole", tiny_model("llama"))
    interrupt_and_resume(gae_run, tmp_path / "run", tiny_model("llama"), "after step 1", "stopped")
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "whole"))


def test_a_stage_runs_where_its_column_is_needed(tiny_model, tmp_path, trained_with):
    """Before the advantages over everything with a score; otherwise over what is trained, and once."""
    made = []

    def stages(policy):
        made.append([ValueStage(policy), ValueStage(policy, column="next_log_prob")])
        return made[-1]

    changes = {
        "algorithm__selection": [{"kind": "prune", "rate": 0.5}],
        "reward": [{"kind": "tests.runtime.tiny_run:Even", "fail_on": 5}],
        "train__steps": 1,
    }
    tree = recipe(tiny_model("llama"), **{"algorithm": {"preset": "grpo"}} | changes)
    config = resolve({**tree, "folder": str(tmp_path / "run")}).config
    config = replace(config, algorithm=replace(config.algorithm, advantage=Gae()))
    trained_with(stages)
    train(config)
    rows = rollouts_of(tmp_path / "run", 1)
    keys = {(row["prompt_uid"], row["sample"], row["turn"]): row for row in rows}
    assert 0 < sum(not row["valid"] for row in rows) < len(rows)
    early, late = ([item.key for item in stage.packed] for stage in made[0])
    assert sorted(early) == sorted(key for key, row in keys.items() if row["valid"])
    assert sorted(late) == sorted(key for key, row in keys.items() if row["outcome"] == "trained")
    assert len(late) < len(early)
    for uid in {row["prompt_uid"] for row in rows}:  # pruned by the mean over the tokens
        group = [row for row in rows if row["prompt_uid"] == uid and row["valid"]]
        trained = [abs(row["advantage"]) for row in group if row["outcome"] == "trained"]
        pruned = [abs(row["advantage"]) for row in group if row["outcome"] == "dropped_pruned"]
        assert min(trained) >= max(pruned, default=0.0)


def test_reinforce_pp_from_a_recipe(tiny_model, tmp_path):
    """No stage at all; with dynamic sampling, whose selections decide before any advantage is known."""
    selection = [{"kind": "drop_uniform_groups"}, {"kind": "prune", "rate": 0.5}]
    changes = {"algorithm__selection": selection, "algorithm__dynamic_sampling": {"exhausted": "partial"}}
    algorithm = {"preset": "grpo", "advantage": "reinforce_pp"}
    tree = recipe(tiny_model("llama"), train__steps=2, **{"algorithm": algorithm} | changes)
    assert go(tmp_path / "run", tree).status == "done"
    rows = rollouts_of(tmp_path / "run", 2)
    used = [row for row in rows if row["outcome"] in ("trained", "dropped_pruned")]
    rewards = np.repeat([row["reward"] for row in used], [len(row["tokens"]) for row in used])
    whitened = (rewards - rewards.mean()) / rewards.std(ddof=1)
    advantages = np.repeat([row["advantage"] for row in used], [len(row["tokens"]) for row in used])
    assert advantages == pytest.approx(whitened, rel=1e-5, abs=1e-6)
