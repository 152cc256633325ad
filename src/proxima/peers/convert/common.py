"""Conversions that several peers share: batch arithmetic, sampling, optimizer, task and reward."""

import math
from collections.abc import Mapping
from typing import Any

from proxima.config.problems import ConfigError, one_problem
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.options import Options

ONE_PROCESS = "counted for one process; multiply train.prompts_per_step by the number of processes"


def updates(d: Draft, prompts: int, wanted: float, origin: str, note: str = "") -> int:
    """Put `train.updates_per_step`: the largest divisor of `prompts` up to `wanted`, with a note where they differ."""
    most = max(1, min(prompts, math.floor(wanted + 1e-9)))
    found = next(count for count in range(most, 0, -1) if prompts % count == 0)
    if found != wanted:
        nearest = f"{found} is the nearest below that divides {prompts} prompts: no group is split here."
        note = f"{note} The peer makes {wanted:g} updates; {nearest}"
        d.lacks("train.updates_per_step", f"{wanted:g} updates a step split a group over two updates; taken: {found}")
    d.put("train.updates_per_step", found, origin, note.strip())
    return found


def sampling(d: Draft, o: Options, names: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any]) -> None:
    """temperature, top_k, top_p, min_p, max_tokens. A top_k of -1, or beyond any vocabulary, is off: 0 here."""
    for field in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
        value = o.number(*names[field], default=defaults.get(field)) if field in names else None
        if value is None:
            continue
        off = field == "top_k" and (value <= 0 or value >= 10**6)
        note = f"{value:g} means off there" if off and value else ""
        d.put(f"sampling.{field}", 0 if off else value, o.origin(*names[field]), note)


def optimizer(d: Draft, o: Options, names: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any]) -> None:
    """AdamW: lr, beta1, beta2, eps, weight_decay."""
    d.put("train.optimizer.kind", "adamw", f"{o.peer} trains with AdamW")
    for field in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        if field in names:
            d.copy(f"train.optimizer.{field}", o, *names[field], default=defaults.get(field))


SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def schedule(d: Draft, o: Options, *names: str, default: str) -> None:
    """`train.schedule` by its common names; others are listed as unsupported."""
    written = str(o.get(*names, default=default))
    if written in SCHEDULES:
        d.put("train.schedule", SCHEDULES[written], o.origin(*names))
    else:
        d.lacks(f"{names[0]}={written}", "no such schedule; constant is taken")
        d.put("train.schedule", "constant", o.origin(*names), f"{written} has no equivalent")


def model(d: Draft, o: Options, *names: str) -> None:
    """`model.path`, or a placeholder."""
    path = place(o, *names)
    if path is not None:
        d.put("model.path", str(path), o.origin(*names))
        return
    what = "which model: a Hugging Face name, folder or .gguf file" + _unread(o, *names)
    d.ask("model.path", "path/to/model", what)


def place(o: Options, *names: str) -> Any:
    """A path or name; None where the file does not give it, or where it depends on the machine."""
    try:
        return o.get(*names)
    except ConfigError:
        return None


def _unread(o: Options, *names: str) -> str:
    """`; the file has ${HOME}/models/x`, where that is why the path is missing; printable, for it becomes a comment."""
    written = next((o.flat[name] for name in names if o.flat.get(name) is not None), None)
    text = "".join(letter if letter.isprintable() else " " for letter in str(written))
    return "" if written is None else f"; the file has {text[:120]}"


FILES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json")}


def task(d: Draft, o: Options, name: str) -> None:
    """A task for the peer's data: GSM8K by its name, files by their ending, else a data set of the hub."""
    data, origin = place(o, name), o.origin(name)
    paths = [str(one) for one in data] if isinstance(data, list) else [str(data)] if data is not None else []
    kind = next((kind for kind, ends in FILES.items() if all(path.endswith(ends) for path in paths)), None)
    if not paths:
        d.ask("task", "gsm8k", f"where the questions come from; see `proxima list task`{_unread(o, name)}", kind=True)
    elif any("gsm8k" in path.lower() for path in paths):
        note = "read as the public data set; for a prepared file write its kind (parquet, jsonl) and path"
        d.spec("task", "gsm8k", origin, f"{', '.join(paths)}: {note}")
    elif kind is not None:
        files = paths[0] if len(paths) == 1 else paths
        d.spec("task", kind, origin, "see `proxima list task` for the columns it reads", path=(files, origin))
    else:
        d.spec("task", "dataset", origin, "", path=(paths[0], origin))


def reward(d: Draft, weight: tuple[float, str] | None = None) -> None:
    """Append the reward of the task, or a placeholder; `weight` with its origin."""
    kind, path = d.entries.get("task.kind"), f"reward.{rewards_of(d)}"
    if kind is not None and kind.value == "gsm8k" and not kind.origin.startswith("TO FILL IN"):
        d.append("reward", "gsm8k", "of the task; the peer's scorer may read answers otherwise")
    else:
        d.ask(path, "math", "how a completion is scored; see `proxima list reward`", kind=True)
    if weight is not None:
        d.put(f"{path}.weight", *weight)


def rewards_of(d: Draft) -> int:
    """How many rewards the draft has."""
    return len({path.split(".")[1] for path in d.entries if path.startswith("reward.")})


def overlong(
    d: Draft, o: Options, longest: tuple[int, str], buffer: tuple[int, str], factor: tuple[float, str]
) -> None:
    """DAPO's soft overlong penalty, our `overlong` reward; each argument with its origin."""
    most, width = longest[0], buffer[0]
    if not 1 <= width <= most:
        name = buffer[1].removeprefix("from ")
        raise one_problem(name, f"must be between 1 and the {most} tokens of a completion", str(width), o.file)
    if not 0 <= factor[0] < math.inf:
        raise one_problem(factor[1].removeprefix("from "), "must be >= 0, it is subtracted", str(factor[0]), o.file)
    note = f"soft overlong penalty: 0 up to {most - width} tokens, -{factor[0]:g} at {most}"
    d.append("reward", "overlong", buffer[1], note, max_tokens=longest, buffer_tokens=buffer, factor=factor)


def entropy(d: Draft, o: Options, *names: str) -> None:
    """`algorithm.entropy_bonus`, where the coefficient is not 0."""
    value = o.number(*names, default=0)
    if value < 0:
        d.lacks(f"{names[0]}={value:g}", "a negative coefficient would punish entropy")
    elif value:
        d.put("algorithm.entropy_bonus", value, o.origin(*names))
    elif o.given(*names):
        d.drops(names[0], "0: off")


def horizon(d: Draft, mode: str, tokens: Any, origin: str, note: str = "") -> None:
    """The aggregation that divides by a constant; `mode` and `origin`: where kind and constant came from."""
    d.spec("algorithm.aggregate", "sequence_mean_token_sum_norm", mode, note, horizon=(tokens, origin))


def steps(d: Draft, o: Options, count: Any, origin: str, note: str, epochs: str, what: str) -> None:
    """`train.steps`, or a placeholder where the peer counts epochs of data that are not at hand."""
    if count and count > 0:
        d.put("train.steps", int(count), origin, note)
        d.drops_given(o, f"{origin.removeprefix('from ')} overrides it", epochs)
        return
    written = f", here {o.number(epochs):g}" if o.given(epochs) else ""
    d.ask("train.steps", 100, f"{what}{written}: steps = epochs * rows of the data / prompts_per_step")
