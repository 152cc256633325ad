"""Scored groups as rows."""

from proxima.core.advantage import Gdpo
from proxima.data import Completion, Group, Outcomes, Prompt, Score


def test_each_reward_is_a_column_in_the_order_of_the_recipe_and_a_failed_one_is_nan():
    def answer(sample):
        facts = {"sampled_log_prob": (-1.0,), "untruncated_log_prob": (-1.0,), "policy_version": (0,)}
        return Completion(
            prompt_uid=0, sample=sample, tokens=(1,), text="", finish_reason="stop", temperature=1.0, **facts
        )

    scores = (
        Score(value=float("nan"), valid=False, parts={"short": 0.5}, error="number: boom"),
        Score(value=10.5, parts={"number": 10.0, "number/digits": 2.0, "short": 0.5}),
        Score(value=0.1, parts={"number": 0.0, "short": 0.1}),
    )
    group = Group(
        prompt=Prompt(uid=0, messages=(), tokens=(1,)), completions=tuple(map(answer, range(3))), scores=scores
    )
    outcomes = Outcomes.from_groups([group])
    assert outcomes.parts[1:].tolist() == [[10.0, 0.5], [0.0, 0.1]]
    assert outcomes.parts[0].isnan().tolist() == [True, False]
    advantage = Gdpo(finish="none")(
        outcomes
    )  # both rewards are normalised on their own: ±1/√2 each, whatever their scale
    assert advantage[0] == 0
    assert [round(x, 3) for x in advantage.tolist()[1:]] == [1.414, -1.414]
