"""What a rank computes for rank 0: the stages that it has, those that rank 0 has had made, and else its own model."""

from types import SimpleNamespace

from proxima.runtime.placement.follower import RankParts, obey
from proxima.train.messages import Stages


def test_late_stages_are_made_when_rank_0_says_so_and_once():
    made = []

    def make():
        made.append(SimpleNamespace(column="reference_log_prob"))
        return made[-1:]

    stack = SimpleNamespace(model=object())
    parts = RankParts(stacks={"policy": stack}, late_stages=make)
    own = parts.stage("policy", "proximal_log_prob")
    assert (own.column, own.policy, made) == ("proximal_log_prob", stack.model, [])
    obey(Stages("policy"), parts)
    assert parts.stage("policy", "reference_log_prob") is parts.stage("policy", "reference_log_prob") is made[0]
    assert parts.stage("policy", "proximal_log_prob").policy is stack.model and len(made) == 1
