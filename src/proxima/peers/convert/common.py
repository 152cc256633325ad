"""What several peers share: batch arithmetic, sampling, optimizer, task and reward."""

import math
from collections.abc import Mapping
from typing import Any

from proxima.config.problems import ConfigError, one_problem
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.options import Options

ONE_PROCESS = "counted for one process; multiply train.prompts_per_step by the number of processes"


def updates(d: Draft, prompts: int, wanted: float, origin: str, note: str = "") -> int:
    """Put `train.updates_per_step`: the largest divisor of `prompts` up to `wanted`, with a note where that is not
    `wanted`."""
    most = max(1, min(prompts, math.floor(wanted + 1e-9)))
    found = next(count for count in range(most, 0, -1) if prompts % count == 0)
    if found != wanted:
        shown = f"{wanted:g}"
        note = (
            f"{note} The peer makes {shown} updates; {found} is the nearest below that divides {prompts} "
            "prompts: no group is split here."
        )
        d.lacks("train.updates_per_step", f"{shown} updates a step split a group over two updates; taken: {found}")
    d.put("train.updates_per_step", found, origin, note.strip())
    return found


def sampling(d: Draft, o: Options, names: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any]) -> None:
    """temperature, top_k, top_p, min_p, max_tokens. A top_k of -1 or beyond any vocabulary is off, which is 0 here."""
    for field in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
        if field not in names:
            continue
        value = o.number(*names[field], default=defaults.get(field))
        if value is None:
            continue
        note = ""
        if field == "top_k" and (value <= 0 or value >= 10**6):
            note = "" if value == 0 else f"{value:g} is their way to say off"
            value = 0
        d.put(f"sampling.{field}", value, o.origin(*names[field]), note)


def optimizer(d: Draft, o: Options, names: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any]) -> None:
    """AdamW: lr, beta1, beta2, eps, weight_decay."""
    d.put("train.optimizer.kind", "adamw", f"{o.peer} trains with AdamW")
    for field in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        if field in names:
            d.copy(f"train.optimizer.{field}", o, *names[field], default=defaults.get(field))


SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def schedule(d: Draft, o: Options, *names: str, default: str) -> None:
    """`train.schedule` by its common names; the others are listed."""
    written = str(o.get(*names, default=default))
    if written in SCHEDULES:
        d.put("train.schedule", SCHEDULES[written], o.origin(*names))
    else:
        d.lacks(f"{names[0]}={written}", "no such schedule; constant is taken")
        d.put("train.schedule", "constant", o.origin(*names), f"{written} has no equivalent")


def model(d: Draft, o: Options, *names: str) -> None:
    """`model.path`, or a stand-in."""
    path = place(o, *names)
    if path is None:
        d.ask(
            "model.path", "path/to/model", "which model: a Hugging Face name, folder or .gguf file" + _unread(o, *names)
        )
    else:
        d.put("model.path", str(path), o.origin(*names))


def place(o: Options, *names: str) -> Any:
    """A path or name; None where the file does not say it or only a run would know it: it is another on every
    machine."""
    try:
        return o.get(*names)
    except ConfigError:
        return None


def _unread(o: Options, *names: str) -> str:
    """`; the file has ${HOME}/models/x`, where that is why a place is asked for."""
    written = next((o.flat[name] for name in names if o.flat.get(name) is not None), None)
    text = "".join(
        letter if letter.isprintable() else " " for letter in str(written)
    )  # it becomes a comment of the recipe
    return "" if written is None else f"; the file has {text[:120]}"


def task(d: Draft, o: Options, name: str) -> None:
    """A task for the path or hub name of the peer's data: GSM8K by its name, files by their ending, else a hub data
    set."""
    data, origin = place(o, name), o.origin(name)
    paths = [str(one) for one in data] if isinstance(data, list) else [str(data)] if data is not None else []
    if not paths:
        d.ask("task", "gsm8k", f"where the questions come from; see `proxima list task`{_unread(o, name)}", kind=True)
    elif any("gsm8k" in path.lower() for path in paths):
        note = (
            f"{', '.join(paths)}: read as the public data set; for a prepared file write its kind (parquet, "
            "jsonl) and path"
        )
        d.spec("task", "gsm8k", origin, note)
    elif all(path.endswith(".parquet") for path in paths):
        d.spec(
            "task", "parquet", origin, "see `proxima list task` for the columns it reads", path=(_one(paths), origin)
        )
    elif all(path.endswith((".jsonl", ".json")) for path in paths):
        d.spec("task", "jsonl", origin, "see `proxima list task` for the columns it reads", path=(_one(paths), origin))
    else:
        d.spec("task", "dataset", origin, "", path=(paths[0], origin))


def _one(paths: list[str]) -> Any:
    return paths[0] if len(paths) == 1 else paths


def reward(d: Draft, weight: tuple[float, str] | None = None) -> None:
    """The reward of the task, or a stand-in, after those that are there; `weight` with its origin."""
    gsm8k = d.entries.get("task.kind")
    path = f"reward.{rewards_of(d)}"
    if gsm8k is not None and gsm8k.value == "gsm8k" and not gsm8k.origin.startswith("TO FILL IN"):
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
    """DAPO's soft overlong penalty, our `overlong` reward; `longest`, `buffer`, `factor` each with its origin."""
    most, width = longest[0], buffer[0]
    if not 1 <= width <= most:
        raise one_problem(
            buffer[1].removeprefix("from "),
            f"must be between 1 and the {most} tokens of a completion",
            str(width),
            o.file,
        )
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
    """The aggregation that divides by a constant; `mode` and `origin` are where the kind and the constant came from."""
    d.spec("algorithm.aggregate", "sequence_mean_token_sum_norm", mode, note, horizon=(tokens, origin))


def steps(d: Draft, o: Options, count: Any, origin: str, note: str, epochs: str, what: str) -> None:
    """`train.steps`, or a stand-in where the peer counts epochs of data that nobody has seen here."""
    if count and count > 0:
        d.put("train.steps", int(count), origin, note)
        if o.given(epochs):
            d.drops(epochs, f"{origin.removeprefix('from ')} stands over it")
        return
    written = f", here {o.number(epochs):g}" if o.given(epochs) else ""
    d.ask("train.steps", 100, f"{what}{written}: steps = epochs * rows of the data / prompts_per_step")
