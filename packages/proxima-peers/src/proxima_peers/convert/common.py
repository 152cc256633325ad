"""Conversions that several peers share: batch arithmetic, sampling, optimizer, task, reward, held-out questions."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxima.config.tree import FILL_IN
from proxima_peers.convert.draft import Draft, Entry, Fields
from proxima_peers.convert.options import Names, Options, Sourced


def updates(d: Draft, wanted: float, origin: str, note: str = "", path: str = "train") -> int:
    """Put `updates_per_step` of `path`: the largest divisor of the prompts up to `wanted`; a note if it differs."""
    entry = d.entries["train.prompts_per_step"]
    least = math.floor(wanted + 1e-9)
    prompts: int = entry.value
    stands_in = path == "train" and entry.origin.startswith(FILL_IN)
    if stands_in and least > 1 and prompts % least:  # a placeholder may as well be a multiple of the updates
        prompts = math.ceil(prompts / least) * least
        d.entries["train.prompts_per_step"] = replace(entry, value=prompts)
    most = max(1, min(prompts, least))
    divisor = next(count for count in range(most, 0, -1) if prompts % count == 0)
    if divisor != wanted:
        nearest = f"{divisor} is the nearest below that divides {prompts} prompts: no group is split here."
        note = f"{note} The peer makes {wanted:g} updates; {nearest}"
        why = f"{wanted:g} updates a step split a group over two updates; taken: {divisor}"
        d.lacks(f"{path}.updates_per_step", why)
    d.put(f"{path}.updates_per_step", divisor, origin, note.strip())
    if path == "train":
        d.put("train.on_zero_gradient", "step", "no peer skips an update")
    return divisor


def sampling(d: Draft, o: Options, names: Names, defaults: Mapping[str, Any]) -> None:
    """temperature, top_k, top_p, min_p, max_tokens."""
    for field in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
        value = None
        if field in names:
            value = o.number(*names[field], default=defaults.get(field))
        if value is None:
            continue
        kept = top_k_of(value) if field == "top_k" else value
        note = f"{value:g} means off there" if kept != value else ""
        d.put(f"sampling.{field}", kept, o.origin(*names[field]), note)


def top_k_of(value: Any) -> Any:
    """Our top_k: 0, off, for -1 and for values larger than any vocabulary."""
    return 0 if value <= 0 or value >= 10**6 else value


def optimizer(d: Draft, o: Options, names: Names, defaults: Mapping[str, Any], path: str = "train") -> None:
    """AdamW of `train` or `critic`: lr, beta1, beta2, eps, weight_decay."""
    d.put(f"{path}.optimizer.kind", "adamw", f"{o.peer} trains with AdamW")
    for field in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        if field in names:
            d.copy(f"{path}.optimizer.{field}", o, *names[field], default=defaults.get(field))


def betas(d: Draft, o: Options, name: str, path: str, default: list[float] | None = None) -> None:
    """AdamW's beta1 and beta2 from an option with both values."""
    match o.get(name, default=default):
        case [beta1, beta2]:
            for field, value in (("beta1", beta1), ("beta2", beta2)):
                d.put(f"{path}.optimizer.{field}", value, o.origin(name))
        case both if both is not None:
            o.refuse("must be two numbers", name)


SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def schedule(d: Draft, o: Options, *names: str, default: str, path: str = "train") -> None:
    """`schedule` of `train` or `critic` by its common names; an unknown name falls back to `default`."""
    written = o.choice(SCHEDULES, *names, default=default)
    d.put(f"{path}.schedule", SCHEDULES[written], o.origin(*names))


def lowest_rate(d: Draft, o: Options, lowest: tuple[str, ...], shares: tuple[str, ...], path: str = "train") -> None:
    """`final_lr_ratio` of `train` or `critic`: from the lowest learning rate, or from its share of the peak."""
    if d.entries[f"{path}.schedule"].value == "constant":
        d.drops_given(o, "a constant schedule does not fall", *lowest, *shares)
        return
    least = o.number(*lowest)
    peak = d.entries[f"{path}.optimizer.lr"].value
    if least and not peak:
        least = o.refuse("it has no ratio to a learning rate of 0", *lowest)
    if least:
        d.put(f"{path}.final_lr_ratio", least / peak, f"{o.origin(*lowest)}, over the peak")
    else:
        d.copy(f"{path}.final_lr_ratio", o, *shares)


def warmup(d: Draft, updates: tuple[int, str], ratio: tuple[float, str], made: int, rounded: str = "down") -> None:
    """`train.warmup_steps`, or the share of the run `train.warmup_ratio` if the number of steps is to be filled in.

    Args:
        updates: warm-up in our updates, with its origin; 0: not given.
        ratio: warm-up as a share of the run, with its origin.
        made: updates in each of our steps.
        rounded: how the peer rounds a share of the updates, up or down.
    """
    steps = d.entries["train.steps"]
    if updates[0] > 0 or updates[1].startswith(FILL_IN):
        d.put("train.warmup_steps", max(0, updates[0]), updates[1])
    elif ratio[0] <= 0 and not ratio[1].startswith(FILL_IN):
        return
    elif steps.origin.startswith(FILL_IN):
        d.put("train.warmup_ratio", ratio[0], ratio[1], "a share, for the number of steps is to fill in")
    else:
        exact = ratio[0] * steps.value * made
        if rounded == "up":
            whole = math.ceil(exact - 1e-9)
        else:
            whole = math.floor(exact + 1e-9)
        if whole:
            d.put("train.warmup_steps", whole, f"{ratio[1]}, times the {steps.value * made} updates of the run")


DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}


def template_arguments(d: Draft, o: Options, *sections: str, **options: str) -> None:
    """`data.template_arguments`: the options in the peer's sections for them, and single options by our name."""
    inside = [name for name in o.flat for section in sections if name.startswith(f"{section}.")]
    by_key = [(name.rpartition(".")[2], name) for name in inside]
    for key, name in by_key + list(options.items()):
        path = f"data.template_arguments.{key}"
        value = o.get(name) if o.given(name) else None
        if name in o.doubts:
            d.needs(path, f"{name}: {o.doubts[name]}")
        elif value is not None and (path not in d.entries or d.entries[path].value == value):
            d.put(path, value, o.origin(name))
        elif value is not None:
            d.lacks(name, f"{value}: {d.entries[path].origin.removeprefix('from ')} says {d.entries[path].value}")


def dtype(d: Draft, o: Options, field: str, *names: str, default: str, note: str = "") -> None:
    """`model.dtype` or `model.compute_dtype`, if the file sets it."""
    if o.given(*names):
        written = o.choice(DTYPES, *names, default=default)
        d.put(f"model.{field}", DTYPES[written], o.origin(*names), note)


def model(d: Draft, o: Options, *names: str) -> None:
    """`model.path`, or a placeholder."""
    path = o.get(*names)
    if path is not None:
        d.put("model.path", str(path), o.origin(*names))
        return
    d.ask("model.path", "path/to/model", f"which model: a Hugging Face name, folder or .gguf file{_doubts(o, *names)}")


def _doubts(o: Options, *names: str) -> str:
    """The reason why a value is missing, such as `; the file has ${HOME}/models/x`."""
    return "".join(f"; {name}: {o.doubts[name]}" for name in names if name in o.doubts)


FILES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json")}


def is_gsm8k(path: str) -> bool:
    """Return True for the name of GSM8K, or of a file that a peer's script made from it: `…/gsm8k/train.parquet`."""
    *folders, name = path.lower().rstrip("/").split("/")
    return name == "gsm8k" or ("gsm8k" in folders and name.partition(".")[0] in ("train", "test", "validation", "main"))


def task(d: Draft, o: Options, name: str, path: str = "task", split: str = "train", **columns: str) -> None:
    """A task for the peer's data: GSM8K by its name, files by their extension, else a data set on the hub.

    Args:
        name: the option with a path or several.
        columns: fields of the tasks that read tables (`messages`, `question`, `answer`), as the peer reads its rows.
    """
    paths = _paths(o.get(name))
    origin = o.origin(name)
    kind = _kind_of_files(paths)
    fields = {field: (value, f"as {o.peer} reads its rows") for field, value in columns.items()}
    where: Fields = {}
    if split != "train":
        where = {"split": (split, f"which part {o.peer} takes")}
    if not paths:
        d.ask(path, "gsm8k", f"where the questions come from; see `proxima list task`{_doubts(o, name)}", kind=True)
        d.entries.update({f"{path}.{field}": Entry(*value) for field, value in where.items()})
    elif not d.own_columns and all(map(is_gsm8k, paths)) and split in ("train", "test"):
        note = "read as the public data set; for a prepared file write its kind (parquet, jsonl) and path"
        d.spec(path, "gsm8k", origin, f"{', '.join(paths)}: {note}", **where)
    elif kind is not None:
        files = paths[0] if len(paths) == 1 else paths
        d.spec(path, kind, origin, "", path=(files, origin), **fields)
    else:
        d.spec(path, "dataset", origin, "", path=(paths[0], origin), **where, **fields)
        if len(paths) > 1:
            d.wait(path, name, f"{', '.join(paths[1:])}: one data set of the hub is read; prepare the others as files")


def _paths(data: Any) -> list[str]:
    if data is None:
        return []
    if isinstance(data, list):
        return [str(file) for file in data]
    return [str(data)]


def _kind_of_files(paths: list[str]) -> str | None:
    """The task kind that reads files with these extensions, if one reads them all."""
    for kind, extensions in FILES.items():
        if all(path.endswith(extensions) for path in paths):
            return kind
    return None


def reward(d: Draft, weight: tuple[float, str] | None = None) -> None:
    """Append the reward of the task, or a placeholder; `weight` with its origin."""
    kind = d.entries.get("task.kind")
    path = f"reward.{rewards_of(d)}"
    if kind is not None and kind.value == "gsm8k" and not kind.origin.startswith(FILL_IN):
        d.append("reward", "gsm8k", "of the task; the peer's scorer may read answers otherwise")
    else:
        d.ask(path, "math", "how a completion is scored; see `proxima list reward`", kind=True)
    if weight is not None:
        d.put(f"{path}.weight", *weight)


def rewards_of(d: Draft) -> int:
    """Count the rewards in the draft."""
    return len({path.split(".")[1] for path in d.entries if path.startswith("reward.")})


def overlong(d: Draft, longest: Sourced, buffer: Sourced, factor: Sourced) -> None:
    """DAPO's soft overlong penalty, our `overlong` reward; each argument with its origin."""
    most = longest[0]
    width = buffer[0]
    share = factor[0]
    if width is not None and width > most and "'s default of" in longest[1]:  # the lengths are in another file
        longest = (width, f"{FILL_IN}: {longest[1]}, {most}, is below the buffer of {width} tokens")
        most = width
    if width is None or not 1 <= width <= most:
        width = max(1, most // 5)
        buffer = (width, f"{FILL_IN}: {buffer[1]}: a buffer between 1 and the {most} tokens of a completion")
    if share is None or not 0 <= share < math.inf:
        share = 1.0
        factor = (share, f"{FILL_IN}: {factor[1]}: a factor of at least 0, which is subtracted")
    note = f"soft overlong penalty: 0 up to {most - width} tokens, -{share:g} at {most}"
    d.append("reward", "overlong", "its buffer is on", note, max_tokens=longest, buffer_tokens=buffer, factor=factor)


def pruned_groups(d: Draft, o: Options, rate: str, metric: str, *allocation: str) -> None:
    """Completion pruning of lzhxmu/CPPO (arXiv 2503.22342): our selection `prune`."""
    share = o.number(rate, default=0.0, least=0)
    if share >= 1:
        o.refuse("must be below 1", rate)
    if not share or share >= 1:
        d.drops_given(o, "nothing is pruned", rate, metric, *allocation)
        return
    removed = o.choice(KEPT, metric, default="smallest")
    note = "the original's metric names what is removed"
    fields: Fields = {
        "rate": (share, o.origin(rate)),
        "keep": (KEPT[removed], o.origin(metric)),
        "count": ("drop", "the original drops floor(G rate) completions of a group (C2)"),
        "allocate": (o.flag(*allocation), o.origin(*allocation)),
    }
    d.append("algorithm.selection", "prune", o.origin(rate), note, **fields)


KEPT = {"smallest": "largest", "largest": "smallest", "random": "random"}


def critic(d: Draft, o: Options, name: str, *parts: str) -> None:
    """GAE, requested by `name`; its critic's options are not read, so the user has to choose advantage and critic."""
    why = f"{name}: gae needs a critic, whose options are not converted; grpo replaces gae with critic: model"
    d.ask("algorithm.advantage", "grpo", why, True)
    for option in (name, *(part for part in parts if o.given(part))):
        d.lacks(option, "gae: the options of a critic are not converted")


def entropy(d: Draft, o: Options, *names: str) -> None:
    """`algorithm.entropy_bonus`, if the coefficient is not 0."""
    value = o.number(*names, default=0)
    if value < 0:
        d.lacks(f"{names[0]}={value:g}", "a negative coefficient would punish entropy")
    elif value:
        d.put("algorithm.entropy_bonus", value, o.origin(*names))
    elif o.given(*names):
        d.drops(names[0], "0: off")


def horizon(d: Draft, mode: str, tokens: Any, origin: str, note: str = "") -> None:
    """The aggregation that divides by a constant; `mode` and `origin`: the origins of kind and constant."""
    d.spec("algorithm.aggregate", "sequence_mean_token_sum_norm", mode, note, horizon=(tokens, origin))


def steps(d: Draft, o: Options, count: Any, origin: str, note: str, epochs: str, what: str) -> None:
    """`train.steps`, or a placeholder if the peer counts epochs of data whose size is unknown here."""
    if count and count > 0:
        d.put("train.steps", int(count), origin, note)
        d.drops_given(o, f"{origin.removeprefix('from ')} overrides it", epochs)
        return
    number = o.number(epochs) if o.given(epochs) else None
    if origin.startswith(FILL_IN):
        what += f" ({origin.removeprefix(FILL_IN)})"
    if number is not None:
        what += f", here {number:g}"
    d.ask("train.steps", 100, f"{what}: steps = epochs * rows of the data / prompts_per_step")


def length_of_run(d: Draft, o: Options, steps: str, passes: str, epochs: int) -> None:
    """`train.steps` of a training on a fixed data set, or `train.epochs`, which defaults to `epochs`."""
    most = o.whole(steps, default=0)
    if most > 0:
        d.put("train.steps", most, o.origin(steps))
        d.drops_given(o, f"{steps.rpartition('.')[2]} ends the run", passes)
    else:
        d.put("train.epochs", o.whole(passes, default=epochs, least=1), o.origin(passes))


def warmup_of_rows(d: Draft, o: Options, steps: str, *ratios: str, share: float) -> None:
    """The warm-up of a training on a fixed data set, in updates or as a share of the run, which defaults to `share`."""
    fixed = o.whole(steps, default=0)
    if fixed > 0:
        d.put("train.warmup_steps", fixed, o.origin(steps))
        d.drops_given(o, f"{steps.rpartition('.')[2]} says more", *ratios)
    else:
        d.put("train.warmup_ratio", o.number(*ratios, default=share, least=0, most=1), o.origin(*ratios))


def evaluation(d: Draft, o: Options, data: str, every: tuple[int, str], split: str = "test", **columns: str) -> bool:
    """Put `eval.task` and `eval.every` from the option that names the held-out data; return True if it did.

    Args:
        data: the option.
        every: our steps between evaluations, with their origin.
        split, columns: as for `task`.
    """
    if not o.given(data):
        return False
    if o.get(data) is None:
        why = f"{data}: {o.doubts[data]}; held-out questions, and eval.every={every[0]} ({every[1]})"
        d.wait("eval.task", "eval.task", why)
        return False
    task(d, o, data, path="eval.task", split=split, **columns)
    d.put("eval.every", *every)
    d.put("eval.limit", 0, f"{o.peer}'s default, all questions")
    return True


def eval_sampling(d: Draft, o: Options, names: Names, defaults: Mapping[str, float], *, greedy: bool) -> None:
    """`eval.samples` and `eval.sampling`: from the file or the peer's defaults, else as in training.

    Args:
        names: field of `eval.sampling` → options; `samples` as well.
        defaults: the peer's defaults; fields without one are as in training.
        greedy: take the most probable token, whatever the temperature.
    """
    if greedy:
        d.put("eval.samples", 1, "greedy")
    else:
        d.put("eval.samples", o.whole(*names["samples"], default=1), o.origin(*names["samples"]))
    for field in ("temperature", "top_k", "top_p", "max_tokens"):
        training = d.entries.get(f"sampling.{field}")
        value = None
        origin = f"{o.peer}'s default"
        if field in names:
            value = o.number(*names[field])
            origin = o.origin(*names[field])
        if value is None:
            value = defaults.get(field)
        if value is None and training is not None:
            value = training.value
            origin = "as in training"
        if field == "temperature" and greedy:
            value = 0
            origin = "greedy"
        if value is None:
            continue
        if field == "top_k":
            value = top_k_of(value)
        d.put(f"eval.sampling.{field}", value, origin)
