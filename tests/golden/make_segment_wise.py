"""Writes segment_wise.json: segment-wise decoupled PPO, one token after the other, in Python floats.

    python -m tests.golden.make_segment_wise

No peer has the mathematics in a version that can be installed; this is algorithms.md's formula without torch. Each row
is a completion trained at version 6; `next_log_prob` is what the rule makes of (version, cached).
"""

import math
import random
from typing import Any

from tests.golden.by_formula import record, write

V, CAP, FLOOR, CLIP = 6, 5.0, 0.2, 0.4


def towards(version: int, behavior: float, proximal: float, cached: float | None) -> float | None:
    """log π_min(v + 1, V), or None where it is missing."""
    return behavior if version == V else proximal if version == V - 1 else cached


def made(name: str, seed: int, lengths: list[int], *, missing: float) -> dict[str, Any]:
    draw = random.Random(seed)
    columns: dict[str, list[list[float | None]]] = {}
    weights: list[list[float]] = []
    gradient: list[list[float]] = []
    advantage = [round(draw.gauss(0, 1), 2) for _ in lengths]
    longest, tokens, total = max(lengths), sum(lengths), 0.0
    for a, length in zip(advantage, lengths, strict=True):
        rows: dict[str, list[float | None]] = {}
        row_weights, row_gradient = [], []
        for _ in range(length):
            version, mu = draw.randint(2, V), -draw.uniform(0.5, 3)
            proximal = min(mu + draw.gauss(0, 0.8), -0.01)
            cached = None if draw.random() < missing else min(mu + draw.gauss(0, 0.8), -0.01)
            pi = min(proximal + draw.gauss(0, 0.4), -0.01)
            target = towards(version, mu, proximal, cached)
            w = 0.0 if target is None else math.exp(target - mu)
            w = w if FLOOR <= w <= CAP else 0.0
            r = math.exp(pi - proximal)
            free, clipped = -a * r, -a * min(max(r, 1 - CLIP), 1 + CLIP)
            total += w * max(free, clipped)
            row_weights.append(w)
            row_gradient.append(w * free / tokens if free >= clipped else 0.0)
            values = {"log_prob": pi, "proximal_log_prob": proximal, "behavior_log_prob": mu, "next_log_prob": target}
            for key, value in {"mask": 1, "policy_version": version, **values}.items():
                rows.setdefault(key, []).append(value)
        for key, row in rows.items():
            filler = 0 if key in ("mask", "policy_version") else -1.0
            columns.setdefault(key, []).append([*row, *[filler] * (longest - length)])
        weights.append([*row_weights, *[0.0] * (longest - length)])
        gradient.append([*row_gradient, *[0.0] * (longest - length)])
    specs = {
        "surrogate": {"kind": "ppo_clip", "epsilon_low": CLIP, "epsilon_high": CLIP},
        "correction": {"kind": "cap_floor", "upper": CAP, "lower": FLOOR, "towards": "next"},
        "aggregate": {"kind": "token_mean"},
    }
    expected = {"loss": total / tokens, "denominator": tokens, "weight": weights, "grad_log_prob": gradient}
    return record(f"segment_wise/{name}", specs, columns | {"advantage": advantage}, expected)


if __name__ == "__main__":
    write(__file__, [made("whole", 1, [7, 3, 5], missing=0.0), made("missing", 2, [6, 1, 8], missing=0.4)])
