"""Deviations between two runs of the same recipe."""

import json
import math
from pathlib import Path
from typing import Any

LEFT_OUT = (
    "time",
    "device",
    "sync",
    "memory",
    "rate",
    "idle",
    "async",
)  # first words of what is measured of the machine, not of the training
FED = "tokens/trained"  # a prompt counts once in each micro-batch that has a completion of it: as the shares are packed
DIFFERENCES = 1.0
"""The unit of figures that are differences of nearly equal numbers, or means of what cancels: the loss and advantages
(of order 1 after normalising), KL, log-prob differences and chi-square (nats, of log-probs of order 5), covariances.
Their rounding is that of what was subtracted, however small the difference."""
LOG_PROB = 5.0
"""nats, the log-prob of a token of a random model. A ratio is the exponential of a difference of two: its relative
error is their absolute one, compared with their size."""
RATIOS = ("ratio", "rollout_is", "ppl")
CANCELS = ("loss", "kl", "chi2", "ppl_diff", "absdiff", "deviation", "entropy", "advantage", "margin", "drift", "cov")
CANCELS += (
    "logprob",
    "log_prob",
    "spend",
    "value",
    "score",
    "chosen",
    "rejected",
    "std",
    "divergence",
    "shift",
    "return",
    "pull",
)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without those of the machine; of a step that a resume has written again, the last ones."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = {(line.get("kind"), line.get("step"), line.get("label")): line for line in lines}
    return [{name: x for name, x in line.items() if not _of_the_machine(name)} for line in kept.values()]


def _of_the_machine(name: str) -> bool:
    first = name.partition("/")[0]
    return first in LEFT_OUT or name == FED or "per_second" in name or "seconds" in name or "overlap" in name


def metric_deviations(alone: Path, several: Path) -> dict[str, tuple[float, float]]:
    """Return the largest deviation of each metric that differs at all: as a share of it, and in the unit of
    `DIFFERENCES` or `LOG_PROB`. Infinite if a count or a text differs, or only one run has the metric."""
    first, second = records(alone), records(several)
    worst: dict[str, tuple[float, float]] = {}
    if [(r["kind"], r.get("step")) for r in first] != [(r["kind"], r.get("step")) for r in second]:
        worst["records"] = (math.inf, math.inf)
    for a, b in zip(first, second, strict=False):
        for name in a.keys() | b.keys():
            pair = _deviation(name, a.get(name), b.get(name))
            if pair > (0.0, 0.0):
                worst[name] = max(worst.get(name, (0.0, 0.0)), pair, key=lambda each: each[1])
    return worst


def _deviation(name: str, a: Any, b: Any) -> tuple[float, float]:
    if a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        return 0.0, 0.0
    if not (isinstance(a, float) and isinstance(b, float)):
        return math.inf, math.inf
    apart, size = abs(a - b), max(abs(a), abs(b))
    share = apart / size
    if any(word in name for word in CANCELS):
        return share, apart / max(size, DIFFERENCES)
    return share, share / LOG_PROB if any(word in name for word in RATIOS) else share


def norm_deviations(alone: Path, several: Path) -> dict[str, float]:
    """Return the largest relative deviation of gradient norms: `exact_norm`, of several ranks from one process, both
    computed in float64; `logged_1`, `logged_N`, of the logged norm of each from its own in float64. Empty if the
    optimizer wrote none or a step has several updates."""
    exact = [exact_norms(folder) for folder in (alone, several)]
    logged = [[x["grad_norm"] for x in records(folder) if x["kind"] == "train"] for folder in (alone, several)]
    if not exact[0] or len(exact[0]) != len(logged[0]):
        return {}

    def apart(first: list[float], second: list[float]) -> float:
        return max(abs(a - b) / b for a, b in zip(first, second, strict=True))

    return {
        "exact_norm": apart(exact[1], exact[0]),
        "logged_1": apart(logged[0], exact[0]),
        "logged_N": apart(logged[1], exact[1]),
    }


def exact_norms(folder: Path) -> list[float]:
    """Return the gradient norm of each update, from what each rank has written about its own gradients."""
    ranks = [
        list(map(float, file.read_text(encoding="utf-8").split()))
        for file in sorted(Path(f"{folder}-squares").glob("*"))
    ]
    return [math.sqrt(sum(squares)) for squares in zip(*ranks, strict=True)]


def tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of the last checkpoint, by file and name."""
    from safetensors.torch import load_file

    checkpoint = max(path for path in (folder / "checkpoints").glob("0*") if (path / "state.json").exists())
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)}:{name}": x for file in files for name, x in load_file(file).items()}


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights of the last checkpoint by folder and name, without the optimizer state, whose files depend on
    the layout."""
    out = {}
    for name, x in tensors(folder).items():
        file, _, parameter = name.partition(":")
        if "optimizer" not in file:
            out[f"{Path(file).parent}/{parameter}"] = x
    return out


def weight_deviation(alone: Path, several: Path, start: Path | None) -> tuple[float, float | None]:
    """Return the largest difference of a weight relative to the largest of its tensor, and the norm of all differences
    relative to that of the run's whole change (None if its initial weights are unknown)."""
    first, second = weights(alone), weights(several)
    if first.keys() != second.keys():
        return math.inf, None
    largest = max(float((second[n] - x).abs().max() / x.abs().max().clamp(min=1e-30)) for n, x in first.items())
    if start is None:
        return largest, None
    from safetensors.torch import load_file

    before = {f"model/{name}": x for name, x in load_file(start / "model.safetensors").items()}
    common = before.keys() & first.keys()
    moved = sum(float((first[n].double() - before[n].double()).square().sum()) for n in common)
    apart = sum(float((first[n].double() - second[n].double()).square().sum()) for n in common)
    return largest, math.sqrt(apart / moved) if moved else None


def completions(folder: Path) -> list[Any]:
    """Return the tokens of all completions that the run has stored."""
    import pyarrow.parquet as parquet

    rows = []
    for file in sorted((folder / "rollouts").glob("*.parquet")):
        table = parquet.read_table(file)
        name = next((n for n in ("tokens", "completion_tokens", "response_tokens") if n in table.column_names), None)
        rows += [] if name is None else table.column(name).to_pylist()
    return rows
