"""What a rank computes for rank 0: the stages that it has, those that rank 0 has had made, and else its own model."""

from types import SimpleNamespace

import pytest

from proxima.data import UserError
from proxima.runtime.placement import follower
from proxima.runtime.placement.follower import RankModels, read_when_visible
from proxima.training.checkpoint import read_checkpoint
from proxima.training.ranks import Stages


def test_late_stages_are_made_when_rank_0_says_so_and_once():
    made = []

    def make():
        made.append(SimpleNamespace(column="reference_log_prob"))
        return made[-1:]

    stack = SimpleNamespace(model=object())
    models = RankModels(stacks={"policy": stack}, late_stages=make)
    own = models.stage("policy", "proximal_log_prob")
    assert (own.column, own.policy, made) == ("proximal_log_prob", stack.model, [])
    models.take_part(Stages("policy"))
    assert models.stage("policy", "reference_log_prob") is models.stage("policy", "reference_log_prob") is made[0]
    assert models.stage("policy", "proximal_log_prob").policy is stack.model and len(made) == 1


def test_a_node_that_does_not_see_the_checkpoint_loads_no_other_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(follower, "FOLDER_SECONDS", 0.0)
    with pytest.raises(UserError, match="the checkpoint .*000002 is not visible on this node; set folder=PATH"):
        read_when_visible("checkpoint", tmp_path / "checkpoints/000002", read_checkpoint)
