"""What no single field can see: whether the parts of a config fit each other and this machine. Nothing is loaded.

A check is a function from `Resolved` to problems, listed in `CHECKS` (they stop the run) or `WARNINGS` (they are shown,
and it goes on).
To add one: the function, a line in the list, and the case as a user types it in `tests/config/test_check.py`.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.config.describe import table_of
from proxima.config.errors import ConfigError, Problem
from proxima.config.read import shown_path
from proxima.config.resolve import Resolved, resolve
from proxima.config.schema import RunConfig
from proxima.core.advantage import Advantage, needs_baseline
from proxima.core.selection import Balance, Prune
from proxima.data.outcomes import METRIC_ALIASES, METRICS

if TYPE_CHECKING:
    from proxima.task import Arithmetic

FROM_THE_TRAINER = frozenset({"advantage", "proximal_log_prob", "entropy"})
FROM_ANY_ENGINE = frozenset({"behavior_log_prob", "policy_version"})
FROM_TOP_K = frozenset({"top_k", "behavior_top_k_log_prob", "top_k_log_prob"})
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
LOCAL_FOLDERS = ("models", "model", "checkpoints", "runs", "outputs", "data")  # a hub name never begins like this

Check = Callable[[Resolved[Any]], Iterator[Problem]]


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Resolved[RunConfig]:
    """`resolve`, then `check`.

    Raises:
        ConfigError: one line for each problem.
    """
    resolved = resolve(recipe, overrides)
    if problems := check(resolved):
        raise ConfigError(problems)
    return resolved


def check(resolved: Resolved[Any]) -> list[Problem]:
    """Everything that would stop the run later."""
    return [problem for one in CHECKS for problem in one(resolved)]


def warnings(resolved: Resolved[Any]) -> list[Problem]:
    """What runs, but seldom means what was wanted."""
    return [problem for one in WARNINGS for problem in one(resolved)]


def training_samples(r: Resolved[Any]) -> Iterator[Problem]:
    """Temperature 0 gives the same completion every time: no group has anything to compare."""
    if r.config.sampling.temperature == 0:
        yield r.problem(
            "sampling.temperature", "training needs samples, 0 is greedy; set it > 0, evaluation is greedy by itself"
        )


def behavior_is_what_was_sampled(r: Resolved[Any]) -> Iterator[Problem]:
    """The truncated distribution gives probability 0 to tokens that the policy may reach: its ratio to the policy is no
    trust region."""
    if r.config.sampling.truncates and r.config.algorithm.behavior == "sampled":
        cut = next(
            name for name in ("top_k", "top_p", "min_p") if r.config.sampling.__getattribute__(name) != _OFF[name]
        )
        message = (
            "behavior=sampled compares the policy with the truncated distribution; set "
            f"algorithm.behavior=untruncated or {cut}={_OFF[cut]}"
        )
        yield r.problem(f"sampling.{cut}", message)


_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def groups_say_something(r: Resolved[Any]) -> Iterator[Problem]:
    """An advantage relative to the group is 0 in a group of one."""
    if r.config.train.completions_per_prompt == 1 and not needs_baseline(r.config.algorithm.advantage):
        kind = r.entry("algorithm.advantage.kind").value
        message = (
            f"a group of one has advantage 0 under {kind!r}, so nothing would be learned; take at least 2, 8 is usual"
        )
        yield r.problem("train.completions_per_prompt", message)


def needs_are_met(r: Resolved[Any]) -> Iterator[Problem]:
    """Every tensor that a spec declares in `needs` comes from the engine, the trainer or the reference model."""
    from proxima.core.loss import SUPPLIED_BY

    algorithm, engine = r.config.algorithm, r.config.engine
    supplied = FROM_THE_TRAINER | frozenset(getattr(engine, "provides", FROM_ANY_ENGINE))
    if algorithm.reference_kl is not None:
        supplied |= {"reference_log_prob"}
    specs = {slot: getattr(algorithm, slot) for slot in ("surrogate", "aggregate", "reference_kl")}
    specs |= {f"correction.{i}": spec for i, spec in enumerate(algorithm.correction)}
    for slot, spec in specs.items():
        missing = (frozenset() if spec is None else spec.needs) - supplied
        kind = r.entry(f"algorithm.{slot}.kind").value if missing else None
        if missing & FROM_TOP_K and getattr(engine, "top_k_log_probs", None) == 0:  # one switch for all of them
            message = f"{kind!r} with these values needs the engine's top-k log-probs; set engine.top_k_log_probs=20"
            yield r.problem(f"algorithm.{slot}.kind", message)
            missing -= FROM_TOP_K
        for name in sorted(missing):
            remedy = SUPPLIED_BY.get(name, "nothing here supplies it")
            if name == "reference_log_prob":
                remedy = "set algorithm.reference_kl, it brings the frozen reference model"
            else:
                remedy = f"engine {r.entry('engine.kind').value!r} has none; {remedy}"
            yield r.problem(f"algorithm.{slot}.kind", f"{kind!r} needs `{name}`: {remedy}")


def advantage_can_be_had(r: Resolved[Any]) -> Iterator[Problem]:
    """The loop gives advantages rewards and groups, and takes one number a completion back."""
    spec = r.config.algorithm.advantage
    kinds = table_of("proxima.core.advantage:ADVANTAGES")
    usable = ", ".join(kind for kind, cls in sorted(kinds.items()) if not beyond_the_loop(cls))
    if found := beyond_the_loop(spec):
        kind = r.entry("algorithm.advantage.kind").value
        yield r.problem("algorithm.advantage.kind", f"{kind!r} {found}, which this loop has not; take one of {usable}")


def beyond_the_loop(advantage: Advantage | type[Advantage]) -> str | None:
    """What an advantage, or its class, wants that the loop has not: ``needs `value` ``; None where it can be had."""
    if needs := sorted(set(advantage.needs) - {"baseline", "group"}):
        return f"needs `{needs[0]}`"
    return "gives a number for each token" if advantage.per_token else None


def freed_places_are_filled(r: Resolved[Any]) -> Iterator[Problem]:
    """Pruning with `allocate` keeps the size of an update only where whole groups fill the freed places."""
    size = r.config.train.completions_per_prompt
    for i, spec in enumerate(r.config.algorithm.selection):
        if isinstance(spec, Prune) and spec.allocate and not spec.keeps_size(size):
            found = (
                f"a group of {size} (train.completions_per_prompt) keeps {spec.kept(size)}, which does not divide it"
            )
            if spec.scope == "batch":
                found = f"rate {spec.rate:g} of the batch leaves a share that is not 1/2, 1/3, 1/4 …"
            message = (
                f"{found}, so an update can't keep its size; take a rate and a group size that do, as rate "
                "0.5, 0.75 or 0.875 with 16, "
            )
            yield r.problem(f"algorithm.selection.{i}.allocate", message + "or allocate=false")


def refill_has_a_reason(r: Resolved[Any]) -> Iterator[Problem]:
    """Dynamic sampling fills the places of groups that a selection drops; pruning and balancing leave something of
    every group."""
    algorithm = r.config.algorithm
    if algorithm.dynamic_sampling is not None and all(
        isinstance(spec, Balance | Prune) for spec in algorithm.selection
    ):
        message = (
            "no selection drops whole groups, so nothing has to be filled up; add drop_uniform_groups to "
            "algorithm.selection, or set "
            "algorithm.dynamic_sampling=null"
        )
        yield r.problem("algorithm.dynamic_sampling.max_num_gen_batches", message)


def baseline_has_all_rewards(r: Resolved[Any]) -> Iterator[Problem]:
    """A reward of the whole batch speaks after the greedy baseline was taken."""
    from proxima.reward.base import as_reward

    if needs_baseline(r.config.algorithm.advantage):
        for i, reward in enumerate(r.config.reward):
            if as_reward(reward).whole_batch:
                message = (
                    "a reward of the whole batch is no part of the greedy baseline; leave it out, or take "
                    "another algorithm.advantage"
                )
                yield r.problem(f"reward.{i}.kind", message)


def metrics_are_known(r: Resolved[Any]) -> Iterator[Problem]:
    """A selection that looks at a metric names one that completions have."""
    from proxima.reward.base import as_reward

    known = {*METRICS, *METRIC_ALIASES, *(as_reward(reward).label for reward in r.config.reward)}
    for i, spec in enumerate(r.config.algorithm.selection):
        metric = getattr(spec, "metric", None)
        if isinstance(metric, str) and metric not in known:
            yield r.problem(
                f"algorithm.selection.{i}.metric",
                f"completions have no such metric; there are {', '.join(sorted(known))}",
            )


def model_is_there(r: Resolved[Any]) -> Iterator[Problem]:
    """A path that looks local exists and is a model; a hub name looks like one."""
    if remedy := model_problem(r.config.model.path):
        yield r.problem("model.path", remedy)


def model_problem(path: str) -> str | None:
    """Why `path` can't be a model, with the remedy; None if it may be one."""
    place = Path(path)
    if place.is_dir():
        there = (place / "config.json").is_file()
        return None if there else "is a folder without config.json; give a Hugging Face model folder or a .gguf file"
    if place.is_file():
        return (
            None
            if place.suffix == ".gguf"
            else "is a file but not .gguf; give the folder that holds config.json, or a .gguf file"
        )
    if _looks_like_hub_name(path):
        return None
    where = "" if place.is_absolute() or path.startswith("~") else ": a path is looked for below the current folder"
    return f"does not exist{where}; {_near(place)}give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B"


def _looks_like_hub_name(path: str) -> bool:
    owner, slash, name = path.partition("/")
    local = owner in LOCAL_FOLDERS or owner.startswith((".", "~")) or Path(owner).is_dir() or path.endswith(".gguf")
    return bool(slash and owner and name) and "/" not in name and " " not in path and not local


def _near(place: Path) -> str:
    names = [child.name for child in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, names, n=1, cutoff=0.6)
    return f"did you mean {shown_path(place.parent / near[0])}? Else " if near else ""


def room_for_completions(r: Resolved[Any]) -> Iterator[Problem]:
    """`max_tokens` leaves room for a prompt in the context."""
    limit, name = r.config.model.max_length, "model.max_length"
    found = Path(r.config.model.path) / "config.json"
    if limit is None and found.is_file():
        limit, name = _context_of(found), f"max_position_embeddings in {shown_path(found)}"
    if limit is None:
        return
    for path, sampling in (("sampling", r.config.sampling), ("eval.sampling", r.config.eval.sampling)):
        if sampling is not None and sampling.max_tokens >= limit:
            yield r.problem(
                f"{path}.max_tokens", f"leaves no room for a prompt: the context is {limit} tokens ({name}); lower it"
            )


def _context_of(file: Path) -> int | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def data_is_there(r: Resolved[Any]) -> Iterator[Problem]:
    """A task that names a data file, or prepared data, names some that exist."""
    from proxima.task.prepared import PreparedTask, prepare_command

    for slot, task in (("task", r.config.task), ("eval.task", r.config.eval.task)):
        if isinstance(task, PreparedTask) and (missing := task.missing()):
            yield r.problem(f"{slot}.path", missing)
        for name, value in vars(task).items() if task is not None else ():
            if isinstance(value, str) and value.endswith(DATA_SUFFIXES) and "://" not in value and "*" not in value:
                place = Path(value).expanduser()
                if not place.is_file():
                    made = prepare_command(place)
                    remedy = f"make it: {made}" if made else f"{_near(place)}give a path relative to the current folder"
                    yield r.problem(f"{slot}.{name}", f"no such file; {remedy}")


def products_can_be_had(r: Resolved[Any]) -> Iterator[Problem]:
    """Autocast lowers the precision of products and never raises it: bf16 weights have bf16 products."""
    if r.config.model.compute_dtype == "float32" and r.config.model.dtype == "bfloat16":
        yield r.problem(
            "model.compute_dtype", "the weights are bfloat16 (model.dtype), so are their products; set both alike"
        )


def device_is_there(r: Resolved[Any]) -> Iterator[Problem]:
    """The device is of a known kind and exists here."""
    import torch

    device = r.config.model.device
    if device in ("auto", "cpu"):
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        yield r.problem("model.device", "is no device; write auto, cpu, cuda or cuda:1")
        return
    if wanted.type not in ("cpu", "cuda"):
        yield r.problem("model.device", "is not supported; write auto, cpu, cuda or cuda:1")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        yield r.problem(
            "model.device", f"this machine has {torch.cuda.device_count()} CUDA devices; take model.device=cpu, or auto"
        )


def best_needs_evaluation(r: Resolved[Any]) -> Iterator[Problem]:
    """`every` and `keep_best` ask for evaluations; without questions there are none."""
    if r.config.eval.task is None:
        if r.config.eval.every:
            yield r.problem("eval.every", "there is nothing to evaluate; set eval.task, or eval.every=0")
        if r.config.checkpoint.keep_best:
            yield r.problem(
                "checkpoint.keep_best", "best by held-out accuracy needs eval.task and eval.every; set them, or false"
            )
    elif r.config.checkpoint.keep_best and not r.config.eval.every:
        yield r.problem(
            "checkpoint.keep_best",
            "needs evaluations during the run; set eval.every to the steps between them, or false",
        )


def held_out_is_held_out(r: Resolved[Any]) -> Iterator[Problem]:
    """The evaluation asks other questions than the training."""
    from proxima.task import Arithmetic

    trained, asked = r.config.task, r.config.eval.task
    if asked is not None and asked == trained:
        yield r.problem(
            "eval.task",
            "the same questions as `task`: the accuracy will be that of training data; give another split or file",
        )
    elif isinstance(asked, Arithmetic) and isinstance(trained, Arithmetic) and not _apart(trained, asked):
        message = (
            "some of its questions are trained on: take split train for `task`, test for `eval.task`, and "
            "one `held_out` for both"
        )
        yield r.problem("eval.task", message)


def _apart(trained: "Arithmetic", asked: "Arithmetic") -> bool:
    """Two sides of a split by hash do not meet: the test side holds no more than the training side leaves out."""
    if trained.split == "train":
        return asked.split == "test" and asked.held_out <= trained.held_out
    return asked.split == "train" and asked.held_out >= trained.held_out


def pruned_as_said(r: Resolved[Any]) -> Iterator[Problem]:
    """Groups are whole completions: a rate that does not fit their size becomes another one."""
    size = r.config.train.completions_per_prompt
    for i, spec in enumerate(r.config.algorithm.selection):
        if isinstance(spec, Prune) and spec.scope == "group" and abs(1 - spec.kept(size) / size - spec.rate) > 1e-9:
            message = (
                f"keeps {spec.kept(size)} of {size} completions, which is a rate of {1 - spec.kept(size) / size:.3g}"
            )
            yield r.problem(f"algorithm.selection.{i}.rate", message)


def warm_up_ends(r: Resolved[Any]) -> Iterator[Problem]:
    """The learning rate reaches its value within the run."""
    train = r.config.train
    updates = train.steps * train.updates_per_step * train.epochs_per_step
    if train.warmup_steps >= updates:
        message = (
            f"the run has {updates} updates, so the learning rate never gets to its value; lower it or raise "
            "train.steps"
        )
        yield r.problem("train.warmup_steps", message)


def completions_fit(r: Resolved[Any]) -> Iterator[Problem]:
    """A whole completion fits the token budget of one forward."""
    if r.config.sampling.max_tokens > r.config.train.tokens_per_micro_batch:
        message = (
            f"a completion may have {r.config.sampling.max_tokens} tokens (sampling.max_tokens): it is "
            "forwarded alone, over budget"
        )
        yield r.problem("train.tokens_per_micro_batch", message)


def overlong_is_reached(r: Resolved[Any]) -> Iterator[Problem]:
    """A completion can become long enough for the penalty."""
    longest = r.config.sampling.max_tokens
    for i, reward in enumerate(r.config.reward):
        if getattr(reward, "kind", None) == "overlong" and reward.max_tokens - reward.buffer_tokens >= longest:
            begins = reward.max_tokens - reward.buffer_tokens
            message = (
                f"the penalty begins after {begins} tokens, and a completion ends at "
                f"sampling.max_tokens={longest}: it is never due"
            )
            yield r.problem(f"reward.{i}.max_tokens", message)


CHECKS: Sequence[Check] = (
    training_samples,
    behavior_is_what_was_sampled,
    groups_say_something,
    needs_are_met,
    advantage_can_be_had,
    freed_places_are_filled,
    refill_has_a_reason,
    baseline_has_all_rewards,
    metrics_are_known,
    model_is_there,
    room_for_completions,
    data_is_there,
    products_can_be_had,
    device_is_there,
    best_needs_evaluation,
)
WARNINGS: Sequence[Check] = (held_out_is_held_out, warm_up_ends, completions_fit, overlong_is_reached, pruned_as_said)
