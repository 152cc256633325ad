"""Writes policy_formulas.json: surrogates, corrections, entropy and distillation, one token after the other, in Python
floats.

    python -m tests.golden.make_policy_formulas

Where no peer's record shows a number: the thresholds of `cppo` and its metrics, top-K buckets, what `geo_mean` keeps,
`tv_band` and a penalty on the tokens that it masks, penalties towards each policy, metrics of rejections. This is
algorithms.md's mathematics without torch and without anything of proxima.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tests.golden.by_formula import edges_of, k3, record, rows_of, write

Columns = dict[str, list[Any]]


@dataclass
class Tokens:
    """Columns on the packed axis, and the places [start, stop) of each sequence."""

    columns: Columns
    edges: list[int]

    @classmethod
    def draw(cls, seed: int, lengths: list[int], spreads: list[float], holes: float = 0.2) -> "Tokens":
        """`spreads`: how far π is from μ in each sequence, nats; the proximal policy is near π."""
        draw = random.Random(seed)
        names = ("log_prob", "behavior_log_prob", "proximal_log_prob", "loss_mask", "sampled", "advantage")
        columns: Columns = {name: [] for name in names}
        for number, (length, spread) in enumerate(zip(lengths, spreads, strict=True)):
            for _ in range(length):
                mu = -draw.uniform(0.05, 2.5)
                pi = min(mu + draw.gauss(0, spread), -1e-3)
                sampled = draw.random() >= holes / 2
                inside = sampled and number != 3 and draw.random() >= holes
                values = (pi, mu, min(pi + draw.gauss(0, 0.1), -1e-3), int(inside), int(sampled))
                for name, value in zip(names, (*values, (-1.5, 1.0, 0.5, -0.25)[number % 4]), strict=True):
                    columns[name].append(value)
        return cls(columns, edges_of(lengths))

    def rows(self, flag: str = "loss_mask") -> list[list[int]]:
        """Of each sequence the places where `flag` is set."""
        return rows_of(self.columns[flag], self.edges)

    @property
    def loss(self) -> list[int]:
        return [i for i, inside in enumerate(self.columns["loss_mask"]) if inside]

    def gap(self, first: str, other: str, i: int) -> float:
        return self.columns[first][i] - self.columns[other][i]

    def log_ratio(self, i: int) -> float:
        return self.gap("log_prob", "proximal_log_prob", i)

    def record(self, name: str, specs: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
        return record(name, specs, self.columns | {"cu_seqlens": self.edges}, expected)


def ratio_metrics(t: Tokens, keep: dict[int, bool]) -> dict[str, float]:
    log_ratio = [t.log_ratio(i) for i in t.loss]
    return {
        "masked_fraction": fmean(not keep[i] for i in t.loss),
        "ratio_mean": fmean(map(math.exp, log_ratio)),
        "ratio_max": max(map(math.exp, log_ratio)),
        "approx_kl": fmean(map(k3, log_ratio)),
        "approx_kl_k1": -fmean(log_ratio),
    }


def column(t: Tokens, values: dict[int, Any], outside: Any = 0.0) -> list[Any]:
    return [values.get(i, outside) for i in range(t.edges[-1])]


def policy_outcome(t: Tokens, loss: dict[int, float], slope: dict[int, float], keep: dict[int, bool]) -> dict[str, Any]:
    """As `token_mean` has it; `slope` is what the sum of the losses changes by."""
    count = len(t.loss)
    return {
        "loss": sum(loss.values()) / count,
        "denominator": count,
        "token_loss": column(t, loss),
        "grad_log_prob": column(t, {i: x / count for i, x in slope.items()}),
        "keep": column(t, {i: int(kept) for i, kept in keep.items()}, 0),
    }


# cppo


def percentile(values: list[float], q: float) -> float:
    ordered, position = sorted(values), q * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def binary_tv(t: Tokens, i: int) -> float:
    return abs(math.exp(t.columns["log_prob"][i]) - math.exp(t.columns["behavior_log_prob"][i]))


def buckets(t: Tokens, i: int, sampled: str, top: str) -> list[float]:
    """The top K, the sampled token unless it is one of these, and all others."""
    own = 0.0 if t.columns["token"][i] in t.columns["top_k"][i] else math.exp(t.columns[sampled][i])
    listed = [*map(math.exp, t.columns[top][i]), own]
    return [*listed, 1 - sum(listed)]


def top_k_tv(t: Tokens, i: int) -> float:
    p, q = (buckets(t, i, f"{who}log_prob", f"{who}top_k_log_prob") for who in ("behavior_", ""))
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def top_k_kl(t: Tokens, i: int) -> float:
    p, q = (buckets(t, i, f"{who}log_prob", f"{who}top_k_log_prob") for who in ("behavior_", ""))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def cppo(name: str, t: Tokens, far: Callable[[Tokens, int], float] = binary_tv, **fields: Any) -> dict[str, Any]:
    given = {"delta": 0.15, "w_min": 0.8, "delta_b": 0.02} | fields
    delta, w_min, delta_b = (given[key] for key in ("delta", "w_min", "delta_b"))
    spent: dict[int, float] = {}
    allowed: dict[int, float] = {}
    for places in t.rows("sampled"):
        distance = [far(t, i) for i in places]
        budget = delta_b
        if places and given.get("budget") != "static":
            budget = min(max(percentile(distance, 0.9), delta_b), 2 * delta_b)
        before_spent = before_weight = 0.0
        for step, i in enumerate(places):
            weight = 1 - (1 - w_min) * step / max(len(places) - 1, 1)
            if len(places) == 1 and given.get("single_token") == "w_min":
                weight = w_min
            spent[i] = weight * distance[step]
            allowed[i] = min(delta, delta + budget * before_weight - before_spent)
            before_spent, before_weight = before_spent + spent[i], before_weight + weight
    keep, loss = {}, {}
    for i in t.loss:
        a, outwards = t.columns["advantage"][i], t.gap("log_prob", "behavior_log_prob", i)
        keep[i] = a * outwards <= 0 or spent[i] <= allowed[i]
        loss[i] = -a * math.exp(t.log_ratio(i)) if keep[i] else 0.0
    metrics = ratio_metrics(t, keep) | {"prefix_spend": fmean(allowed[i] < delta for i in t.loss)}
    more = {"spent": column(t, spent), "allowed": column(t, allowed, delta), "metrics": metrics}
    spec = {"surrogate": {"kind": "cppo", **fields}}
    return t.record(f"cppo/{name}", spec, policy_outcome(t, loss, loss, keep) | more)


def with_distances(t: Tokens, of: Callable[[int, int], float]) -> Tokens:
    """π = .05 + the distance that `of` gives for the number of the token and of all in its sequence; μ = .05."""
    for places in t.rows("sampled"):
        for step, i in enumerate(places):
            t.columns["behavior_log_prob"][i] = math.log(0.05)
            t.columns["log_prob"][i] = math.log(0.05 + of(step, len(places)))
    return t


def tied(step: int, count: int) -> float:
    """Far at first, so that the budget matters from then on; the 90th percentile lies among equal ones."""
    return 0.85 if step < count // 20 else 0.03 if step < count // 4 else 0.002


def with_top_k(t: Tokens, seed: int) -> Tokens:
    """Two of the tokens 0 … 3 are the top K; the sampled one is among them in every second place or so."""
    draw = random.Random(seed)
    names = ("token", "top_k", "behavior_top_k_log_prob", "top_k_log_prob")
    t.columns |= {name: [] for name in names}
    for i in range(t.edges[-1]):
        token, top = draw.randrange(4), [1, 2]
        lists = []
        for who in ("behavior_", ""):
            own = math.exp(t.columns[f"{who}log_prob"][i])
            shares = [(1 - own) * share * draw.uniform(0.8, 1.0) for share in (0.5, 0.3)]
            lists.append(
                [math.log(own if record == token else share) for record, share in zip(top, shares, strict=True)]
            )
        for name, value in zip(names, (token, top, *lists), strict=True):
            t.columns[name].append(value)
    return t


def cppo_records() -> list[dict[str, Any]]:
    spreads = [0.02, 0.08, 0.15, 0.4, 0.06, 0.1, 0.3]
    apart = Tokens.draw(11, [41, 1, 17, 6, 33, 2, 25], spreads)
    even = Tokens.draw(12, [21] * 5, spreads[:5], holes=0.0)
    top_k = with_top_k(Tokens.draw(13, [9, 4, 12], [0.3] * 3), 13)
    return [
        cppo("lengths apart", apart),
        cppo("lengths alike", even),
        cppo("narrow", apart, delta=0.05, w_min=0.5, delta_b=0.005),
        cppo("wide", even, delta=0.3, delta_b=0.05, w_min=1.0),
        cppo("static", apart, budget="static", single_token="w_min"),
        cppo("ties", with_distances(Tokens.draw(14, [40, 21, 60], [0.3] * 3, holes=0.0), tied)),
        cppo(
            "two tokens",
            with_distances(Tokens.draw(16, [2, 1, 2], [0.3] * 3, holes=0.0), lambda i, _: 0.035 - 0.02 * i),
        ),
        cppo("topk_tv", top_k, top_k_tv, divergence="topk_tv"),
        cppo("topk_kl", top_k, top_k_kl, divergence="topk_kl", delta=0.05, delta_b=0.005),
    ]


# geo_mean


def geo_mean(name: str, t: Tokens, **fields: Any) -> dict[str, Any]:
    given = {"epsilon_low": 0.4, "epsilon_high": 0.4, "clip": "directed"} | fields
    loss: dict[int, float] = {}
    slope: dict[int, float] = {}
    keep: dict[int, bool] = {}
    for places in t.rows():
        bounded = []
        for i in places:
            a = math.copysign(1.0, t.columns["advantage"][i])
            low = given["epsilon_low"] if given["clip"] == "log_ratio" and a < 0 else given["epsilon_high"]
            keep[i] = a * t.log_ratio(i) <= low
            bounded.append(a * min(a * t.log_ratio(i), low))
        for i in places:
            loss[i] = -fmean(t.columns["advantage"][j] for j in places) * math.exp(fmean(bounded))
            slope[i] = loss[i] if keep[i] else 0.0
    outcome = policy_outcome(t, loss, slope, keep) | {"metrics": ratio_metrics(t, keep)}
    return t.record(f"geo_mean/{name}", {"surrogate": {"kind": "geo_mean", **fields}}, outcome)


# tv_band, and penalties towards each policy


def tv_band(name: str, t: Tokens, epsilon: float, tau: float) -> dict[str, Any]:
    """With the squared log-ratio to μ on every loss token, also where the band leaves it without a gradient."""
    keep, loss, slope = {}, {}, {}
    out: dict[str, list[bool]] = {"band_above": [], "band_below": [], "band_returning": []}
    for i in t.loss:
        pi, mu = (math.exp(t.columns[who][i]) for who in ("log_prob", "behavior_log_prob"))
        a, d = t.columns["advantage"][i], t.gap("log_prob", "behavior_log_prob", i)
        keep[i] = abs(pi - mu) <= epsilon
        loss[i] = -a * math.exp(t.log_ratio(i)) if keep[i] else 0.0
        slope[i] = loss[i] + 2 * tau * d
        out["band_above"].append(not keep[i] and pi > mu)
        out["band_below"].append(not keep[i] and pi < mu)
        out["band_returning"].append(not keep[i] and a * (pi - mu) <= 0)
    penalty = {i: tau * t.gap("log_prob", "behavior_log_prob", i) ** 2 for i in t.loss}
    outcome = policy_outcome(t, {i: loss[i] + penalty[i] for i in t.loss}, slope, keep)
    outcome |= {"token_loss": column(t, loss), "penalty": column(t, penalty)}
    outcome["metrics"] = ratio_metrics(t, keep) | {key: fmean(values) for key, values in out.items()}
    specs = {
        "surrogate": {"kind": "tv_band", "epsilon": epsilon},
        "penalty": {"kind": "log_ratio_sq", "coefficient": tau, "towards": "behavior"},
    }
    return t.record(f"tv_band/{name}", specs, outcome)


def penalty_towards(t: Tokens, kind: str, towards: str) -> dict[str, Any]:
    values = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: k3(-d), "abs": abs}
    slopes = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: -math.expm1(-d)}
    slopes["abs"] = lambda d: float((d > 0) - (d < 0))
    values["log_ratio_sq"], slopes["log_ratio_sq"] = (lambda d: d * d), (lambda d: 2 * d)
    far = {i: t.gap("log_prob", f"{towards}_log_prob", i) for i in t.loss}
    penalty, count = {i: 0.3 * values[kind](d) for i, d in far.items()}, len(far)
    expected = {
        "penalty": column(t, penalty),
        "loss": fmean(penalty.values()),
        "grad_log_prob": column(t, {i: 0.3 * slopes[kind](d) / count for i, d in far.items()}),
    }
    spec = {"kind": kind, "coefficient": 0.3, "towards": towards}
    return t.record(f"penalty/{kind}/{towards}", {"penalty": spec}, expected)


def band_records() -> list[dict[str, Any]]:
    t, draw = Tokens.draw(41, [9, 1, 14, 3, 0, 7], [0.3, 0.8, 0.2, 0.5, 0.2, 1.0]), random.Random(42)
    t.columns["reference_log_prob"] = [-draw.uniform(0.05, 2.5) for _ in range(t.edges[-1])]
    records = [tv_band("default", t, 0.3, 0.0), tv_band("narrow", t, 0.05, 0.02), tv_band("wide", t, 1.5, 0.1)]
    kinds, policies = ("k1", "k2", "k3", "abs", "log_ratio_sq"), ("behavior", "proximal", "reference")
    return records + [penalty_towards(t, kind, towards) for kind in kinds for towards in policies]


# corrections


def shares(t: Tokens, keep: dict[int, bool]) -> tuple[float, float]:
    """Of the loss tokens, and of the sequences that have one, what a rejection hits."""
    rows = [row for row in t.rows() if row]
    return fmean(not keep[i] for i in t.loss), fmean(any(not keep[i] for i in row) for row in rows)


def rejected(t: Tokens, name: str, spec: dict[str, Any], keep: dict[int, bool], metrics: dict[str, float]) -> dict:
    tokens, sequences = shares(t, keep)
    prefix = f"correction/{name}"
    metrics |= {f"{prefix}_masked_fraction": tokens, f"{prefix}_seq_masked_fraction": sequences}
    metrics |= {"correction/rejected_fraction": tokens, "correction/rejected_seq_fraction": sequences}
    kept = column(t, {i: int(k) for i, k in keep.items()}, 0)
    fields = "/".join(str(value) for value in spec.values())
    return t.record(f"rejected/{fields}", {"correction": spec}, {"weight": kept, "keep": kept, "metrics": metrics})


def two_outcomes(t: Tokens, i: int) -> tuple[list[float], list[float]]:
    """This token, or any other, under the proximal and under the behavior policy."""
    pi, mu = (math.exp(t.columns[name][i]) for name in ("proximal_log_prob", "behavior_log_prob"))
    return [pi, 1 - pi], [mu, 1 - mu]


def apart(t: Tokens, i: int, statistic: str) -> float:
    """How far the proximal is from the behavior policy at a token."""
    (pi, mu), gap = two_outcomes(t, i), t.gap("proximal_log_prob", "behavior_log_prob", i)
    return {
        "ratio": gap,
        "k1": -gap,
        "k2": gap * gap / 2,
        "k3": k3(gap),
        "tv": abs(pi[0] - mu[0]),
        "ratio_tv": abs(pi[0] / mu[0] - 1),
        "binary_kl": max(kl(pi, mu), kl(mu, pi)),
    }[statistic]


def rejection(t: Tokens, name: str, low: float, **fields: Any) -> dict[str, Any]:
    statistic = fields.get("statistic", "ratio")
    each = {i: apart(t, i, statistic) for i in t.loss}
    reduced: dict[int, float] = dict(each)
    values = list(each.values())
    if fields.get("level") == "sequence":
        rows = [row for row in t.rows() if row]
        values = [{"sum": sum, "mean": fmean, "max": max}[fields["reduce"]]([each[i] for i in row]) for row in rows]
        reduced = {i: value for row, value in zip(rows, values, strict=True) for i in row}
    if statistic == "ratio":
        values, reduced = [math.exp(x) for x in values], {i: math.exp(x) for i, x in reduced.items()}
    upper = fields["upper"]
    prefix, mean = f"correction/rollout_rs_{name}", fmean(values)
    metrics = {
        f"{prefix}_mean": mean,
        f"{prefix}_max": max(values),
        f"{prefix}_min": min(values),
        f"{prefix}_std": math.sqrt(fmean((x - mean) ** 2 for x in values)),
        f"{prefix}_fraction_high": fmean(x > upper for x in values),
        f"{prefix}_fraction_low": fmean(x < low for x in values),
    }
    keep = {i: low <= x <= upper for i, x in reduced.items()}
    if fields.get("keep_returning"):
        sign = {i: t.columns["advantage"][i] * t.gap("proximal_log_prob", "behavior_log_prob", i) for i in keep}
        keep = {i: inside or sign[i] <= 0 for i, inside in keep.items()}
    return rejected(t, f"rollout_rs_{name}", {"kind": "rejection", **fields}, keep, metrics)


def correction_records() -> list[dict[str, Any]]:
    t = Tokens.draw(21, [9, 1, 14, 3, 0, 7], [0.3, 0.3, 0.1, 0.2, 0.2, 0.6])
    draw = random.Random(22)
    t.columns["entropy"] = [draw.uniform(0, 3) for _ in range(t.edges[-1])]
    values = [
        rejection(t, "token_k1", 1 / 1.3, upper=1.3),
        rejection(t, "seq_sum_k1", 0.7, level="sequence", reduce="sum", upper=1.5, lower=0.7),
        rejection(t, "seq_mean_k3", -math.inf, level="sequence", statistic="k3", reduce="mean", upper=0.03),
        rejection(t, "seq_max_k2", -math.inf, level="sequence", statistic="k2", reduce="max", upper=0.1),
        rejection(t, "seq_mean_k1", -0.05, level="sequence", statistic="k1", reduce="mean", upper=0.05),
        *(
            rejection(t, name, -math.inf, statistic=statistic, upper=upper, **how)
            for name, statistic, upper, how in (
                ("token_binary_kl", "binary_kl", 0.02, {}),
                ("token_binary_kl", "binary_kl", 0.02, {"keep_returning": True}),
                ("token_tv", "tv", 0.05, {}),
                ("seq_mean_tv", "tv", 0.05, {"level": "sequence", "reduce": "mean"}),
                ("seq_max_tv", "tv", 0.1, {"level": "sequence", "reduce": "max", "keep_returning": True}),
                ("seq_sum_tv", "tv", 0.4, {"level": "sequence", "reduce": "sum"}),
                ("seq_mean_ratio_tv", "ratio_tv", 0.2, {"level": "sequence", "reduce": "mean", "keep_returning": True}),
            )
        ),
    ]
    for share in (1.0, 0.3):
        edge = percentile([t.columns["entropy"][i] for i in t.loss], 1 - share)
        keep = {i: share == 1 or t.columns["entropy"][i] >= edge for i in t.loss}
        values.append(rejected(t, "top_entropy", {"kind": "top_entropy", "share": share}, keep, {}))
    entropy, count = t.columns["entropy"], len(t.loss)
    expected = {
        "penalty": column(t, {i: -0.02 * entropy[i] for i in t.loss}),
        "loss": -0.02 * fmean(entropy[i] for i in t.loss),
        "grad_entropy": column(t, dict.fromkeys(t.loss, -0.02 / count)),
    }
    values.append(t.record("entropy", {"penalty": {"kind": "entropy", "coefficient": 0.02}}, expected))
    return values


# score centering


def centering_records() -> list[dict[str, Any]]:
    """REINFORCE with the mean of the head and the tail subtracted, of ratios that are near 1 and far from it."""
    t = with_top_k(Tokens.draw(41, [7, 1, 5, 3], [0.3, 0.3, 0.6, 0.2]), 42)
    count, coefficients, tails = len(t.loss), {}, {}
    for i in t.loss:
        pi, mu = ([*map(math.exp, t.columns[f"{who}top_k_log_prob"][i])] for who in ("", "behavior_"))
        tails[i] = 1 - sum(mu)
        coefficients[i] = [m - tails[i] / (1 - sum(pi)) * p for m, p in zip(mu, pi, strict=True)]
    advantage, head = t.columns["advantage"], t.columns["top_k_log_prob"]
    loss = {
        i: -advantage[i] * (t.columns["log_prob"][i] - sum(c * x for c, x in zip(own, head[i], strict=True)))
        for i, own in coefficients.items()
    }
    metrics = {"drift": fmean(sum(map(abs, own)) for own in coefficients.values()), "tail": fmean(tails.values())}
    slopes = {i: [advantage[i] * c / count for c in own] for i, own in coefficients.items()}
    expected = {
        "loss": sum(loss.values()) / count,
        "grad_log_prob": column(t, {i: -advantage[i] / count for i in t.loss}),
        "grad_top_k_log_prob": column(t, slopes, [0.0] * len(head[0])),
        "metrics": {f"correction/score_centering_{name}": value for name, value in metrics.items()},
    }
    specs = {"surrogate": {"kind": "reinforce"}, "correction": {"kind": "score_centering"}}
    return [t.record("score_centering", specs, expected)]


# distillation


def distillation(name: str, t: Tokens, of: Callable[[list[float], list[float]], float], **spec: Any) -> dict[str, Any]:
    """Over three buckets and the rest; `of` takes the probabilities of student and teacher."""
    whole = [
        [[*map(math.exp, row), 1 - sum(map(math.exp, row))] for row in t.columns[name]]
        for name in ("bucket_log_prob", "teacher_bucket_log_prob")
    ]
    value = {i: of(whole[0][i], whole[1][i]) for i in t.loss}
    metrics = {
        "divergence": fmean(value.values()),
        "sampled_reverse_kl": fmean(t.gap("log_prob", "teacher_log_prob", i) for i in t.loss),
        "student_rest": fmean(whole[0][i][-1] for i in t.loss),
        "teacher_rest": fmean(whole[1][i][-1] for i in t.loss),
    }
    expected = {"divergence": column(t, value), "metrics": {f"distillation/{k}": v for k, v in metrics.items()}}
    return t.record(f"distillation/{name}", {"distillation": spec}, expected)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def distillation_records() -> list[dict[str, Any]]:
    t, draw = Tokens.draw(31, [5, 3], [0.3, 0.3]), random.Random(32)
    t.columns["teacher_log_prob"] = [-draw.uniform(0.1, 3) for _ in range(t.edges[-1])]
    for name in ("bucket_log_prob", "teacher_bucket_log_prob"):
        t.columns[name] = [[math.log(draw.uniform(0.05, 0.3)) for _ in range(3)] for _ in range(t.edges[-1])]

    def jensen_shannon(p: list[float], q: list[float]) -> float:
        mixture = [0.3 * b + 0.7 * a for a, b in zip(p, q, strict=True)]
        return 0.3 * kl(q, mixture) + 0.7 * kl(p, mixture)

    return [
        distillation("reverse_kl", t, kl, kind="reverse_kl"),
        distillation("forward_kl", t, lambda p, q: kl(q, p), kind="forward_kl"),
        distillation("js", t, jensen_shannon, kind="js", beta=0.3),
    ]


if __name__ == "__main__":
    outliers = Tokens.draw(15, [8, 1, 13, 4, 6], [0.5] * 5)
    outliers.columns["proximal_log_prob"] = [x - 0.7 * (i % 5 - 2) for i, x in enumerate(outliers.columns["log_prob"])]
    outliers.columns["proximal_log_prob"] = [min(x, -1e-3) for x in outliers.columns["proximal_log_prob"]]
    records = cppo_records()
    records += [geo_mean("directed", outliers), geo_mean("wide", outliers, epsilon_high=0.8)]
    records += [geo_mean("log_ratio", outliers, epsilon_low=0.1, epsilon_high=0.5, clip="log_ratio")]
    records += correction_records() + centering_records() + distillation_records() + band_records()
    write(__file__, records)
