"""Rewards: completions go in, named scores come out, in the same order. One file per family.

    base        the base classes, and the checks of each score       runner   runs a list of rewards over a group
    calls       how a reward is called: at once, in threads, by the jobs of `workers`
    text, length, repetition, math/     read a text            function, unit_tests    run code, in workers
    model_reward, http, server/         run a model, here or behind HTTP
    judge, judge_prompt, verdicts       a language model as a judge            posting   the requests of http and judge

A reward is a frozen spec with `score(prompt, completions) -> list[Score]`. `RewardRunner` runs a list of them over a
group, adds their weighted values, and turns an exception or a timeout into `Score(valid=False, error=...)`, never into
0.0. `where` determines how a reward runs: `inline` (bounded linear time), `thread` (trusted Python, or waiting for a
server), `compute` (a model, in the thread of the tensor work), `text` (a worker process with time and memory limits,
for text that a model wrote), `function` (a worker process that loads a user's function). A reward that compares all
groups sets `whole_batch` and defines `score_batch(groups)`.
Imports: stdlib, httpx, `proxima.data`, `proxima.model`; math-verify and reasoning_gym only in the workers. Imported by
`evaluation`, `prepare` and the rooms above; `core` and `training` see scores as numbers only.
To add one: (1) a file with the spec, a subclass of `WeightedReward`; (2) a line in `REWARDS`; (3) ten real completions,
right and wrong, in `tests/reward/test_<name>.py`. The tests of all rewards (order, hostile text, docstring) find it in
the dict and construct it with its `example_fields` where a field has no default. Out of tree:
`{kind: my_pkg.rewards:Style, weight: 0.2}`. Stable: `WeightedReward`, `RewardRunner`.
"""

from proxima.data.kinds import Kinds

REWARDS = Kinds(
    {
        "accuracy_1_5_2": "proxima.reward.math.numbers:Accuracy152",
        "boxed": "proxima.reward.math.marked:Boxed",
        "diversity": "proxima.reward.repetition:Diversity",
        "environment": "proxima.reward.environment_reward:EnvironmentReward",
        "exact": "proxima.reward.text:Exact",
        "format": "proxima.reward.text:Format",
        "function": "proxima.reward.function:Function",
        "function_batch": "proxima.reward.function:FunctionBatch",
        "gsm8k": "proxima.reward.math.marked:Gsm8kReward",
        "http": "proxima.reward.http:Http",
        "judge": "proxima.reward.judge:Judge",
        "length": "proxima.reward.length:Length",
        "math": "proxima.reward.math.symbolic:Math",
        "missing_eos": "proxima.reward.length:MissingEos",
        "model": "proxima.reward.model_reward:ModelReward",
        "number": "proxima.reward.math.numbers:Number",
        "overlong": "proxima.reward.length:Overlong",
        "reasoning_gym": "proxima.reward.reasoning_gym:ReasoningGymReward",
        "regex": "proxima.reward.text:Regex",
        "repetition": "proxima.reward.repetition:Repetition",
        "unit_tests": "proxima.reward.unit_tests:UnitTests",
    }
)

__all__ = ["REWARDS"]
