"""Held-out questions: which, how often, how sampled."""

from collections.abc import Mapping

from proxima.peers.convert import common
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.options import Options

Names = Mapping[str, tuple[str, ...]]


def evaluation(d: Draft, o: Options, data: str, every: tuple[int, str], split: str = "test", **columns: str) -> bool:
    """`eval.task` and `eval.every` from the option that names the held-out data; whether there is an evaluation.

    Args:
        data: the option.
        every: our steps between evaluations, with their origin.
        split, columns: see `common.task`.
    """
    if not o.given(data):
        return False
    where = o.get(data)
    if where is None:
        d.lacks(data, f"{o.doubts[data]}: held-out questions, set eval.task and eval.every={every[0]}")
        return False
    common.task(d, o, data, path="eval.task", split=split, **columns)
    d.put("eval.every", *every)
    return True


def eval_sampling(d: Draft, o: Options, names: Names, defaults: Mapping[str, float], *, greedy: bool) -> None:
    """`eval.samples` and `eval.sampling`: what the file or the peer's defaults say, over the sampling of training.

    Args:
        names: field of `eval.sampling` → options; `samples` as well.
        defaults: what the peer takes where the file says nothing; the others are as in training.
        greedy: the most probable token is taken, whatever the temperature.
    """
    samples = o.whole(*names["samples"], default=1) if not greedy else 1
    d.put("eval.samples", samples, "greedy" if greedy else o.origin(*names["samples"]))
    for field in ("temperature", "top_k", "top_p", "max_tokens"):
        training = d.entries.get(f"sampling.{field}")
        value = o.number(*names[field]) if field in names else None
        origin = o.origin(*names[field]) if field in names else f"{o.peer}'s default"
        value = defaults.get(field) if value is None else value
        if value is None and training is not None:
            value, origin = training.value, "as in training"
        if field == "temperature" and greedy:
            value, origin = 0, "greedy"
        if value is not None:
            d.put(f"eval.sampling.{field}", common.top_k_of(value) if field == "top_k" else value, origin)
