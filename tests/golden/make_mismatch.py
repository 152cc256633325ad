"""Writes mismatch.json: engine against trainer, one token after the other, in Python floats.

    python tests/golden/make_mismatch.py

No peer has all of these figures, nor the guard. This is what docs/mismatch.md and algorithms.md define, without torch
and without anything of proxima.
"""

import json
import math
import random
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

CATASTROPHIC, EDGES = 1e-4, (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
PERCENTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
ABOVE = {"log_prob_absdiff_mean": (0.05, 0.1)}  # healthy up to the first number, no action up to the second
BELOW = {"rollout_is_eff_sample_size": (0.8, 0.3)}
Rows = list[list[tuple[float, float]]]  # of each sequence the (log π, log μ) of its loss tokens


def k3(x: float) -> float:
    return math.expm1(x) - x


def safe(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def distribution(name: str, values: list[float], correction: int = 0) -> dict[str, float]:
    mean = fmean(values)
    variance = sum((x - mean) ** 2 for x in values) / max(len(values) - correction, 1)
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(variance),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
        f"{name}_eff_sample_size": mean**2 / fmean(x * x for x in values),
    }


def binned(x: float) -> float:
    """The middle of the bin that holds x: bins of 1 % of |x| from 1e-7 to 20, and 0 below."""
    size = min(round(math.log(max(abs(x) / 1e-7, 1.0)) / math.log(1.01)), 1921)
    return math.copysign(1e-7 * 1.01**size, x) if size else 0.0


def of_columns(name: str, rho: list[float]) -> dict[str, float]:
    by_name = {"k3_kl": k3, "log_prob_absdiff": abs}
    return {f"{name}/{key}": fmean(map(of, rho)) if rho else math.nan for key, of in by_name.items()}


def perplexities(rows: Rows) -> dict[str, float]:
    training = [-fmean(pi for pi, _ in row) for row in rows]
    rollout = [-fmean(mu for _, mu in row) for row in rows]
    gap = [a - b for a, b in zip(training, rollout, strict=True)]
    return {
        "training_ppl": fmean(map(math.exp, training)),
        "training_log_ppl": fmean(training),
        "rollout_ppl": fmean(map(math.exp, rollout)),
        "rollout_log_ppl": fmean(rollout),
        "ppl_ratio": fmean(map(math.exp, gap)),
        "log_ppl_diff": fmean(gap),
        "log_ppl_diff_abs": fmean(map(abs, gap)),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
    }


def figures(rows: Rows, quarters: list[int]) -> dict[str, float]:
    rows = [row for row in rows if row]
    pairs = [pair for row in rows for pair in row]
    rho, gaps = [pi - mu for pi, mu in pairs], [abs(math.exp(pi) - math.exp(mu)) for pi, mu in pairs]
    sums, lengths = [sum(pi - mu for pi, mu in row) for row in rows], [len(row) for row in rows]
    means = [fmean(safe(pi - mu) for pi, mu in row) for row in rows]
    result = distribution("rollout_is", [safe(x) for x in rho])
    result |= distribution("rollout_is_sequence", [safe(x) for x in sums])
    result |= distribution("rollout_is_geometric", [safe(x / n) for x, n in zip(sums, lengths, strict=True)])
    result |= distribution("rollout_is_seq", means, correction=1)
    del result["rollout_is_seq_eff_sample_size"]
    ordered = sorted(map(binned, rho))
    result |= {f"rollout_is_{p}": math.exp(ordered[math.floor(q * (len(rho) - 1))]) for p, q in PERCENTILES.items()}
    distance = distribution("prob_absdiff", gaps)
    result |= {f"prob_absdiff_{name}": distance[f"prob_absdiff_{name}"] for name in ("mean", "std", "max")}
    below = [[pi - mu < math.log(CATASTROPHIC) for pi, mu in row] for row in rows]
    result |= {
        "rollout_is_seq_max_deviation": max(abs(x - 1) for x in means),
        "rollout_is_catastrophic_token_fraction": fmean(x for row in below for x in row),
        "rollout_is_catastrophic_seq_fraction": fmean(map(any, below)),
        "kl": -fmean(rho),
        "k3_kl": fmean(map(k3, rho)),
        "chi2_token": fmean(safe(x) ** 2 - 1 for x in rho),
        "chi2_seq": fmean(safe(x) ** 2 - 1 for x in sums),
        "log_prob_absdiff_mean": fmean(map(abs, rho)),
        "log_prob_absdiff_max": max(map(abs, rho)),
    }
    for quarter in range(4):
        result |= of_columns(
            f"position_{quarter + 1}_of_4", [x for x, q in zip(rho, quarters, strict=True) if q == quarter]
        )
    for low, high in pairwise(EDGES):
        chosen = [pi - mu for pi, mu in pairs if low <= math.exp(mu) < high]
        name = f"probability_{low:g}_{high:g}"
        result |= of_columns(name, chosen) | {f"{name}/token_fraction": len(chosen) / len(rho)}
    return result | perplexities(rows)


def levels(by_name: dict[str, float], kl: float, catastrophic: float) -> dict[str, int]:
    """Of each figure that has a healthy range: 0 in it, 1 outside, 2 where something must be done."""
    above = ABOVE | {"k3_kl": (min(0.01, kl), kl)}
    above |= {"rollout_is_catastrophic_seq_fraction": (min(0.01, catastrophic), catastrophic)}
    judged = {name: sum(by_name[name] > bound for bound in bounds) for name, bounds in above.items()}
    judged |= {name: sum(by_name[name] < bound for bound in bounds) for name, bounds in BELOW.items()}
    return judged | {"rollout_is_mean": sum(abs(by_name["rollout_is_mean"] - 1) > bound for bound in (0.1, 0.5))}


def token(draw: random.Random, far: float, extreme: bool) -> tuple[float, float]:
    """(log π, log μ): equal, nearly equal, apart, or where `far` and `extreme` ask for it worlds apart."""
    mu, kind = -draw.choice((0.05, 0.4, 1.5, 3.5, 8.0)) * draw.uniform(0.5, 1), draw.random()
    if kind < far:
        return (mu - draw.uniform(9.5, 12), mu)
    if extreme and kind < far + 0.1:
        return draw.choice([(-0.5, -25.5), (-26.0, -1.0)])
    if kind < 0.3:
        return (mu, mu)
    if kind < 0.5:
        return (mu + draw.choice((-1, 1)) * 10 ** -draw.uniform(4, 9), mu)
    return (min(mu + draw.gauss(0, 0.25), -1e-3), mu)


def made(
    name: str, seed: int, lengths: list[int], guard: dict[str, float], *, far: float = 0.0, all_: bool = False
) -> dict:
    draw = random.Random(seed)
    columns: dict[str, list[float]] = {"log_prob": [], "behavior_log_prob": [], "loss_mask": []}
    rows: Rows = []
    quarters: list[int] = []
    for number, length in enumerate(lengths):
        rows.append([])
        for place in range(length):
            inside = number != 2 and draw.random() < 0.85
            pi, mu = token(draw, far, extreme=name == "extreme")
            for column, value in zip(columns.values(), (pi, mu, int(inside)), strict=True):
                column.append(value)
            if inside:
                rows[-1].append((pi, mu))
                quarters.append(place * 4 // length)
    result = figures(rows, quarters)
    kl, catastrophic = guard.get("max_k3_kl", 0.05), guard.get("max_catastrophic", 0.05)
    over = result["k3_kl"] > kl or result["rollout_is_catastrophic_seq_fraction"] > catastrophic
    bad = [
        bool(row) and (fmean(k3(a - b) for a, b in row) > kl or any(a - b < math.log(CATASTROPHIC) for a, b in row))
        for row in rows
    ]
    expected = {"exceeded": int(over), "rejects": [int(over and entry) for entry in bad]}
    expected |= {"health": {f"mismatch/{metric}": level for metric, level in levels(result, kl, catastrophic).items()}}
    if all_:
        expected |= {"metrics": {f"mismatch/{k}": "nan" if math.isnan(x) else x for k, x in result.items()}}
    inputs = columns | {"cu_seqlens": [0, *accumulate(lengths)]}
    head = {"name": f"mismatch/{name}", "source": "by hand", "dtype": "float64", "mismatch": guard}
    return head | {"inputs": inputs, "expected": expected}


LENGTHS = [9, 1, 4, 0, 17, 6, 12]
RECORDS = [
    made("near", 1, LENGTHS, {}, all_=True),
    made("far", 2, LENGTHS, {"max_k3_kl": 0.02}, far=0.06, all_=True),
    made("extreme", 3, LENGTHS, {"on_mismatch": "reject"}, far=0.05, all_=True),
    made("within", 2, LENGTHS, {"max_k3_kl": 5.0, "max_catastrophic": 1.0}, far=0.06),
    made("catastrophic alone", 2, LENGTHS, {"max_k3_kl": 5.0, "max_catastrophic": 0.1}, far=0.06),
    made("k3 alone", 1, LENGTHS, {"max_k3_kl": 0.01, "max_catastrophic": 0.5}),
]

if __name__ == "__main__":
    text = ",\n".join(json.dumps(each, separators=(",", ":")) for each in RECORDS)
    Path(__file__).with_name("mismatch.json").write_text(f"[\n{text}\n]\n")
