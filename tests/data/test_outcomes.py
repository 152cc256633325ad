"""Scored groups as rows."""

from proxima.core.advantage.group import Gdpo
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.outcomes import Outcomes


def group(uid, *scores):
    completions = tuple(Completion.of_text(uid, sample, "", tokens=(1,)) for sample in range(len(scores)))
    return Group(prompt=Prompt(uid=uid, messages=(), tokens=(1,)), completions=completions, scores=scores)


def test_rewards_are_columns_in_the_recipes_order_and_failed_ones_nan():
    scores = (
        Score(value=float("nan"), valid=False, parts={"short": 0.5}, error="number: boom"),
        Score(value=10.5, parts={"number": 10.0, "number/digits": 2.0, "short": 0.5}),
        Score(value=0.1, parts={"number": 0.0, "short": 0.1}),
    )
    outcomes = Outcomes.from_groups([group(0, *scores)])
    assert outcomes.parts[1:].tolist() == [[10.0, 0.5], [0.0, 0.1]]
    assert outcomes.parts[0].isnan().tolist() == [True, False]
    advantage = Gdpo(finish="none")(outcomes)  # each reward is normalised on its own: ±1/√2, whatever its scale
    assert advantage[0] == 0
    assert [round(x, 3) for x in advantage.tolist()[1:]] == [1.414, -1.414]


def test_rewards_of_several_tasks_are_columns_that_gdpo_compares_apart():
    rewards = {"code": (0.0, 4.0), "math": (0.25, 0.75)}
    groups = [
        group(uid, *(Score(value=value, parts={name: value}) for value in values))
        for uid, (name, values) in enumerate(rewards.items())
    ]
    both = Outcomes.from_groups(groups)
    assert both.part_names == ("code", "math")
    assert both.parts.isnan().tolist() == [[False, True]] * 2 + [[True, False]] * 2
    named = Outcomes.from_groups(groups, ("math", "code"))
    assert named.part_names == ("math", "code") and named.metric("code").isnan().tolist() == [False, False, True, True]
    advantage = Gdpo(finish="none", weights=(3.0, 1.0))(named)  # the absent reward neither adds nor scales
    assert [round(x, 3) for x in advantage.tolist()] == [-0.707, 0.707, -2.121, 2.121]
    single = Outcomes.from_groups(groups[:1], ("math", "code"))  # a batch without a row of one task
    assert Gdpo(finish="none", weights=(3.0, 1.0))(single).tolist() == advantage.tolist()[:2]
