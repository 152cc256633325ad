"""Writes outcome_formulas.json: advantages of long completions, selections, preferences, KL in the reward, proximal
policies between versions, one number after the other, in Python floats.

    python -m tests.golden.make_outcome_formulas

Where no peer's record shows a number: peers balance nothing, their records are of at most twelve tokens, and their
`bco_pair` has no shift. This is algorithms.md's mathematics without torch and without anything of proxima.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from tests.golden.by_formula import edges_of, plain, record, rows_of, variance, write


def members_of(group: list[int]) -> dict[int, list[int]]:
    result = defaultdict(list)
    for i, label in enumerate(group):
        result[label].append(i)
    return result


# advantages of tokens


def to_go(rewards: list[float], factor: float) -> list[float]:
    collected, after = [], 0.0
    for reward in reversed(rewards):
        after = reward + factor * after
        collected.append(after)
    return collected[::-1]


def explained(prediction: dict[int, float], target: dict[int, float]) -> float:
    error = [target[i] - prediction[i] for i in prediction]
    return 1 - variance(error, 1) / variance([target[i] for i in prediction], 1)


def foreseen(rows: list[list[int]], group: list[int], inputs: dict[str, Any], gamma: float) -> dict[str, float]:
    """How much of the variance of what followed the critic foresaw, and the mean reward of the prompt's others."""
    reward, value = inputs["reward"], inputs["value"]
    target = {}
    for row in rows:
        target |= dict(zip(row, to_go([reward[i] for i in row], gamma), strict=True))
    total, others = [sum(reward[i] for i in row) for row in rows], {}
    for members in members_of(group).values():
        for s in members:
            if len(members) > 1:
                others |= dict.fromkeys(rows[s], fmean(total[other] for other in members if other != s))
    by_name = {"explained_variance": explained({i: value[i] for row in rows for i in row}, target)}
    return by_name | {"explained_variance_prompt_mean": explained(others, target)}


def gae_record(name: str, seed: int, lengths: list[int], group: list[int], gamma: float, lam: float) -> dict[str, Any]:
    draw, size = random.Random(seed), sum(lengths)
    mask = [int(draw.random() < 0.9) for _ in range(size)]
    inputs: dict[str, Any] = {"reward": [draw.gauss(0, 0.1) for _ in mask], "value": [draw.gauss(0, 1) for _ in mask]}
    inputs |= {"loss_mask": mask, "cu_seqlens": edges_of(lengths), "group": group}
    inputs["bootstrap"] = [draw.choice((0.0, 0.7)) for _ in lengths]
    rows = rows_of(mask, edges_of(lengths))
    advantage, returns = [0.0] * size, [0.0] * size
    for row, last in zip(rows, inputs["bootstrap"], strict=True):
        after = dict(zip(row, [*(inputs["value"][i] for i in row[1:]), last], strict=False))
        delta = [inputs["reward"][i] + gamma * after[i] - inputs["value"][i] for i in row]
        for i, a in zip(row, to_go(delta, gamma * lam), strict=True):
            advantage[i], returns[i] = a, a + inputs["value"][i]
    measured = {f"value/{k}": v for k, v in foreseen(rows, group, inputs, gamma).items()}
    measured["returns/mean"] = fmean(returns[i] for row in rows for i in row)
    expected = {"advantage": advantage, "returns": returns, "metrics": measured}
    spec = {"kind": "gae", "gamma": gamma, "lam": lam, "whiten": False}
    return record(f"gae/{name}", {"advantage": spec}, inputs, expected)


def reinforce_pp_record(seed: int, lengths: list[int], gamma: float) -> dict[str, Any]:
    draw, size = random.Random(seed), sum(lengths)
    mask, reward = [int(draw.random() < 0.9) for _ in range(size)], [draw.gauss(0, 1) for _ in range(size)]
    by_name = {}
    for row in rows_of(mask, edges_of(lengths)):
        by_name |= dict(zip(row, to_go([reward[i] for i in row], gamma), strict=True))
    mean, scale = fmean(by_name.values()), math.sqrt(variance(list(by_name.values()), 1) + 1e-8)
    advantage = [(by_name[i] - mean) / scale if i in by_name else 0.0 for i in range(size)]
    inputs = {"reward": reward, "loss_mask": mask, "cu_seqlens": edges_of(lengths)}
    spec = {"kind": "reinforce_pp", "gamma": gamma}
    return record("reinforce_pp/long", {"advantage": spec}, inputs, {"advantage": advantage})


# selections


def parts(group: list[int], scope: str) -> list[list[int]]:
    return list(members_of(group).values()) if scope == "group" else [list(range(len(group)))]


def balanced(advantage: list[float], group: list[int], scope: str, most: float) -> list[int]:
    keep = [1] * len(group)
    for members in parts(group, scope):
        for sign in (1, -1):
            same = sorted((i for i in members if advantage[i] * sign > 0), key=lambda i: (-abs(advantage[i]), i))
            others = sum(advantage[i] * sign < 0 for i in members)
            for i in same[math.floor(others * most) :] if others else []:
                keep[i] = 0
    return keep


def kept(size: int, rate: float, count: str) -> int:
    return max(1, size - math.floor(size * rate + 1e-9) if count == "drop" else math.floor(size * (1 - rate) + 1e-9))


def pruned(advantage: list[float], group: list[int], spec: dict[str, Any]) -> dict[str, Any]:
    rate, scope, count = spec["rate"], spec.get("scope", "group"), spec.get("count", "keep")
    keep, sign = [0] * len(group), 1 if spec.get("keep") == "smallest" else -1
    for members in parts(group, scope):
        for i in sorted(members, key=lambda i: (sign * abs(advantage[i]), i))[: kept(len(members), rate, count)]:
            keep[i] = 1
    size, factor = max(map(group.count, group)), 1
    if spec.get("allocate"):
        factor = size // kept(size, rate, count) if scope == "group" else math.floor(1 / (1 - rate) + 1e-9)
    whole = factor * kept(size, rate, count) == size if scope == "group" else abs(factor * (1 - rate) - 1) < 1e-9
    return {"keep": keep, "prompts_factor": factor, "keeps_size": int(whole)}


def varied(metric: list[float], reward: list[float], group: list[int]) -> list[int]:
    """1 for the groups whose known metrics differ; where none is known, whose rewards do."""
    keep = [0] * len(group)
    for members in members_of(group).values():
        names = [metric[i] for i in members if not math.isnan(metric[i])] or [reward[i] for i in members]
        for i in members:
            keep[i] = int(min(names) < max(names))
    return keep


def best_and_worst(advantage: list[float], group: list[int], gap: float) -> list[int]:
    keep = [0] * len(group)
    for members in members_of(group).values():
        best = max(members, key=lambda i: (advantage[i], -i))
        worst = min(members, key=lambda i: (advantage[i], i))
        keep[best] = keep[worst] = int(advantage[best] - advantage[worst] > gap)
    return keep


def selection_records() -> list[dict[str, Any]]:
    draw = random.Random(41)
    group = [7, 7, 3, 7, 3, 3, 7, 7, 3, 5, 7, 3, 7, 9, 9, 7]
    advantage = [draw.choice((-1.5, -0.5, -0.25, 0.0, 0.5, 1.0, 2.0)) for _ in group]
    mirrored, inputs = [-a for a in advantage], {"reward": [0.0] * len(group), "group": group}

    def named(spec: dict[str, Any], a: list[float], expected: dict[str, Any]) -> dict[str, Any]:
        name = "/".join(str(value) for value in spec.values())
        sign = "" if a is advantage else "/mirrored"
        return record(f"selection/{name}{sign}", {"selection": spec}, {**inputs, "advantage": a}, expected)

    collected = []
    for scope, most, a in [("batch", 1.0, advantage), ("group", 1.0, mirrored), ("group", 1.5, advantage)]:
        for values in (a, mirrored if a is advantage else advantage):
            spec = {"kind": "balance", "scope": scope, "most": most}
            collected.append(named(spec, values, {"keep": balanced(values, group, scope, most)}))
    for spec in (
        {"rate": 0.5, "allocate": True},
        {"rate": 0.75, "allocate": True, "scope": "batch"},
        {"rate": 0.6, "allocate": True, "scope": "batch"},
        {"rate": 0.3, "keep": "smallest", "count": "drop"},
    ):
        collected.append(named({"kind": "prune", **spec}, advantage, pruned(advantage, group, spec)))
    for gap in (0.0, 1.0, 2.75):
        expected = {"keep": best_and_worst(advantage, group, gap)}
        collected.append(named({"kind": "best_and_worst", "min_gap": gap}, advantage, expected))
    nan = math.nan
    group = [1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 6]
    correct = [1.0, nan, 1.0, nan, 1.0, 0.0, nan, nan, nan, nan, 1.0, 0.0, 0.0]
    reward = [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.5, 0.6, 0.7, 0.7, 1.0, 0.2, 0.1]
    columns = {"reward": reward, "group": group, "correct": plain(correct)}
    for metric, values in (("accuracy", correct), ("reward", reward)):
        spec = {"kind": "drop_uniform_groups", "metric": metric}
        expected = {"keep": varied(values, reward, group)}
        collected.append(record(f"selection/drop_uniform_groups/{metric}", {"selection": spec}, columns, expected))
    return collected


# preferences: losses of the log-ratios c and r


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


PREFERENCES: list[tuple[dict[str, Any], Callable[[float, float, float], float]]] = [
    (
        {"kind": "bco_pair", "beta": 0.3, "shift": 0.7},
        lambda c, r, b: -log_sigmoid(b * c - 0.7) - log_sigmoid(0.7 - b * r),
    ),
    (
        {"kind": "nca_pair", "beta": 0.2},
        lambda c, r, b: -log_sigmoid(b * c) - (log_sigmoid(-b * c) + log_sigmoid(-b * r)) / 2,
    ),
    ({"kind": "hinge", "beta": 0.4}, lambda c, r, b: max(0.0, 1 - b * (c - r))),
]


def preference_records() -> list[dict[str, Any]]:
    draw, records = random.Random(51), []
    names = ("chosen", "reference_chosen", "rejected", "reference_rejected")
    inputs = {name: [-draw.uniform(2, 30) for _ in range(6)] for name in names}
    c, r = ([a - b for a, b in zip(inputs[x], inputs[f"reference_{x}"], strict=True)] for x in ("chosen", "rejected"))
    for spec, loss in PREFERENCES:
        beta = spec["beta"]
        losses = [loss(a, b, beta) for a, b in zip(c, r, strict=True)]
        metrics = {
            "rewards/chosen": beta * fmean(c),
            "rewards/rejected": beta * fmean(r),
            "rewards/margins": beta * (fmean(c) - fmean(r)),
            "rewards/accuracies": fmean(a > b for a, b in zip(c, r, strict=True)),
        }
        expected = {"pair_loss": losses, "loss": fmean(losses), "metrics": metrics}
        records.append(record(f"preference/{spec['kind']}", {"preference": spec}, inputs, expected))
    return records


# KL in the reward


def reward_kl_record(name: str, spec: dict[str, Any], estimate: Callable[[float], float]) -> dict[str, Any]:
    draw, lengths = random.Random(61), [3, 2, 6, 0, 4]
    mask = [int(i not in (4, 8, 3)) for i in range(sum(lengths))]  # all of the second sequence is outside the loss
    logs = [[-draw.uniform(0.1, 3) for _ in mask] for _ in range(2)]
    score, rows = [1.0, 0.25, -0.5, 2.0, 0.0], rows_of(mask, edges_of(lengths))
    each = {i: estimate(logs[0][i] - logs[1][i]) for row in rows for i in row}
    beta = spec["coefficient"]
    reward = [-beta * each[i] if i in each else 0.0 for i in range(len(mask))]
    for row, points in zip(rows, score, strict=True):
        if row:
            reward[row[-1]] += points
    paid = [beta * sum(each[i] for i in row) for row in rows]
    kl = [fmean(each[i] for i in row) if row else 0.0 for row in rows]
    mean = sum(kl) / sum(map(bool, rows))
    after, adaptive = beta, spec.get("adaptive")
    if adaptive:
        error = min(max(mean / adaptive["target"] - 1, -0.2), 0.2)
        after = beta * (1 + error * min(len(rows) / adaptive["horizon"], 1))
    expected = {"reward": reward, "total": [a - b for a, b in zip(score, paid, strict=True)], "paid": paid, "kl": kl}
    expected |= {"some": [int(bool(row)) for row in rows], "mean_kl": mean, "next_coefficient": after}
    inputs = {"score": score, "log_prob": logs[0], "reference_log_prob": logs[1], "loss_mask": mask}
    return record(f"reward_kl/{name}", {"reward_kl": spec}, inputs | {"cu_seqlens": edges_of(lengths)}, expected)


# proximal policies


def proximal_records() -> list[dict[str, Any]]:
    draw, current = random.Random(71), 6
    version = [6, 5, 4, 3, 2, -1, 6, 5, 0, 4]
    mu, pi, cached = ([-draw.uniform(0.1, 3) for _ in version] for _ in range(3))
    cached[2] = math.nan

    def after(i: int) -> float:
        v = version[i]
        return math.nan if v < 0 else mu[i] if v == current else pi[i] if v == current - 1 else cached[i]

    def between(i: int, kind: str) -> float:
        age = current - version[i]
        share = (age - 1) / age if age > 0 and version[i] >= 0 else 0.0
        if kind == "loglinear":
            return mu[i] + share * (pi[i] - mu[i])
        return math.log(math.exp(mu[i]) + share * (math.exp(pi[i]) - math.exp(mu[i])))

    every = range(len(version))
    shared = {"behavior_log_prob": mu, "policy_version": version, "current_version": current}
    inputs = shared | {"proximal_log_prob": pi, "cached_log_prob": plain(cached)}
    results = [
        record("proximal/next", {"proximal": "next"}, inputs, {"next_log_prob": plain([after(i) for i in every])})
    ]
    for kind in ("linear", "loglinear"):
        expected = {"proximal_log_prob": [between(i, kind) for i in every]}
        results.append(record(f"proximal/{kind}", {"proximal": kind}, shared | {"log_prob": pi}, expected))
    return results


if __name__ == "__main__":
    long, mixed = [150, 70, 64, 65, 1, 129], [1, 2, 1, 2, 3, 1]
    adaptive = {"target": 0.05, "horizon": 20.0}
    records = [
        gae_record("long: g.97 l.9", 81, long, mixed, 0.97, 0.9),
        gae_record("long: g1 l1", 82, [70, 3, 0, 20], [1, 1, 2, 2], 1.0, 1.0),
        gae_record("two tokens", 83, [2, 2], [4, 4], 0.9, 0.5),
        reinforce_pp_record(84, [130, 64, 63, 2], 0.95),
        *selection_records(),
        *preference_records(),
        reward_kl_record("k1", {"coefficient": 0.1}, lambda d: d),
        reward_kl_record("abs", {"coefficient": 0.3, "estimator": "abs"}, abs),
        reward_kl_record(
            "adaptive", {"coefficient": 0.1, "adaptive": adaptive, "estimator": "k2"}, lambda d: d * d / 2
        ),
        *proximal_records(),
    ]
    write(__file__, records)
