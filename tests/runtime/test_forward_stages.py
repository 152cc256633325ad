"""Forward passes before the advantages and before the update."""

from dataclasses import dataclass, field, replace

import pytest

from proxima.config.resolution import resolve
from proxima.core.advantage.token import Gae
from proxima.data.trajectory import Trajectory
from proxima.runtime.launch.run import train
from proxima.training.forward_stage import LogProbStage
from tests.runtime.tiny_run import NO_EVAL, recipe, rollouts_of


@dataclass(frozen=True)
class Recorded(LogProbStage):
    """Keeps what it was given. Its log-probs serve as values too."""

    packed: list[Trajectory] = field(default_factory=list)

    def pack(self, trajectories):
        self.packed.extend(trajectories)
        return super().pack(trajectories)


@pytest.mark.slow
def test_a_stage_runs_where_its_column_is_needed(tiny_model, tmp_path, monkeypatch):
    """Before the advantages over everything with a score; otherwise over what is trained, and once."""
    made = []

    def stages(config, source, policy, *rest, **how):
        made.extend(Recorded(column, policy) for column in ("value", "next_log_prob"))
        return made

    monkeypatch.setattr("proxima.runtime.launch.learning.needs_stages", lambda config: True)
    monkeypatch.setattr("proxima.runtime.launch.learning.make_stages", stages)
    changes = {
        "algorithm": {"preset": "grpo", "selection": [{"kind": "prune", "rate": 0.5}]},
        "reward": [{"kind": "tests.runtime.tiny_run:Even", "fail_on": 5}],
        "train__steps": 1,
        **NO_EVAL,
    }
    config = resolve({**recipe(tiny_model("llama"), **changes), "folder": str(tmp_path / "run")}).config
    train(replace(config, algorithm=replace(config.algorithm, advantage=Gae())))
    rows = rollouts_of(tmp_path / "run", 1)
    keys = {(row["prompt_uid"], row["sample"], row["turn"]): row for row in rows}
    assert 0 < sum(not row["valid"] for row in rows) < len(rows)
    early, late = ([item.key for item in stage.packed] for stage in made)
    assert sorted(early) == sorted(key for key, row in keys.items() if row["valid"])
    assert sorted(late) == sorted(key for key, row in keys.items() if row["outcome"] == "trained")
    assert len(late) < len(early)
    for uid in {row["prompt_uid"] for row in rows}:  # pruned by the mean over the tokens
        group = [row for row in rows if row["prompt_uid"] == uid and row["valid"]]
        trained = [abs(row["advantage"]) for row in group if row["outcome"] == "trained"]
        pruned = [abs(row["advantage"]) for row in group if row["outcome"] == "dropped_pruned"]
        assert min(trained) >= max(pruned, default=0.0)
