"""Turns a peer's file into a recipe: reads it, converts it with the modules of the peer, and makes it loadable."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from proxima.config.problems import ConfigError, Problem, one_problem
from proxima.config.resolution import resolve
from proxima.config.tree import FILL_IN
from proxima.config.validate import check
from proxima_peers.convert import PEERS
from proxima_peers.convert.draft import Draft, Entry
from proxima_peers.convert.known import not_a_training, option_rules, sort_out
from proxima_peers.convert.not_read import NOT_READ, is_not_read, refuse_what_is_not_read
from proxima_peers.convert.options import Options, on_one_line
from proxima_peers.convert.pruning_fork import only_evaluates
from proxima_peers.convert.read import read
from proxima_peers.convert.read_python import CONVERTED, NOT_CONVERTED


def likely_peers(path: str | Path) -> list[str]:
    """The peers, keys of `PEERS`, for which the file sets known options and the fewest unknown ones: usually one; empty
    if it fits no peer. ConfigError if the file can't be read."""
    options = read(Path(path))
    refuse_what_is_not_read(path, options)
    named = {name: Options(peer.title, options, str(path)) for name, peer in PEERS.items()}
    fits = [name for name, o in named.items() if offline_training(o, name) is not None or not why_not(o, name)]
    unknown = {name: len(convert(path, name).unknown) for name in fits}
    return [name for name in fits if unknown[name] == min(unknown.values())]


def convert(path: str | Path, peer: str) -> Draft:
    """The recipe of a file of `peer`, a key of `PEERS`; one of `NOT_READ` is refused and told the page.

    Raises:
        ConfigError: the file can't be read, or is not a training of that peer that can be converted.
    """
    if peer in NOT_READ:
        raise is_not_read(path, peer)
    title = PEERS[peer].title
    o = Options(title, read(Path(path)), str(path))
    refuse_what_is_not_read(path, o.flat)
    command = offline_training(o, peer)
    why = why_not(o, peer) if command is None else None
    if why is not None:
        raise one_problem(o.file, f"is not such a configuration of {title}: it {why}; {_wanted(path, why)}")
    for name in ("config", "defaults", "launch"):  # a base file that is missing here is recorded as a doubt
        o.get(name)
    draft: Draft
    if command is None:
        draft = module_of(PEERS[peer].online).convert(o)
        rules = option_rules(peer)
    else:
        offline = module_of(PEERS[peer].offline)
        draft = offline.convert_offline(o, command)
        rules = offline.rules_of(o)
    draft.doubt(o)
    sort_out(draft, o, rules)
    evaluated = evaluating_command(draft, o)
    draft.problems = make_loadable(draft)
    draft.account(o)
    draft.assume(o.peer, PEERS[peer].version)
    draft.ignored[:] = dict.fromkeys(draft.ignored)  # once each
    draft.head = f"Made by `proxima peers convert {path} --from {peer}`: "
    draft.head += "each value is followed by the option it came from."
    if evaluated:
        draft.head += f"\nThe file evaluates a model and trains nothing: {evaluated}"
    if draft.problems:
        draft.head += "\nAs it stands: " + "; ".join(draft.problems)
    return draft


def _wanted(path: str | Path, why: str) -> str:
    """What to give instead of a file that is none of this peer, for this reason."""
    if why.endswith(NOT_CONVERTED):
        return CONVERTED
    others = likely_peers(path)
    if len(others) == 1:
        return f"it looks like one of {PEERS[others[0]].title}: --from {others[0]}"
    return "name the framework with --from, and give its configuration of a training with rewards"


def module_of(name: str) -> Any:
    return import_module(f"proxima_peers.convert.{name}")


def offline_training(o: Options, peer: str) -> str | None:
    """The training, such as `sft`, of a file without rewards; None for any other file."""
    offline = PEERS[peer].offline
    if not offline:
        return None
    command: str | None = module_of(offline).training_of(o)
    return command


def why_not(o: Options, peer: str) -> str | None:
    """The reason why the file is not a training with rewards of this peer; None if it is one."""
    offline = PEERS[peer].offline
    why = not_a_training(o, peer)
    other = getattr(module_of(offline), "other_training", None) if offline else None
    if other is not None:
        why = other(o, why)
    return why


def evaluating_command(draft: Draft, o: Options) -> str:
    """The command for a file that evaluates only: verl's `val_only`, or the evaluation of the completion pruning's
    authors, which takes one answer, greedily. Empty for a training."""
    pruning = only_evaluates(o)
    if not pruning and str(o.flat.get("trainer.val_only")).lower() != "true":
        return ""
    if pruning and "eval.task.kind" in draft.entries:
        draft.put("eval.samples", 1, "one answer in its evaluate()")
        draft.put("eval.sampling.temperature", 0, "greedy in its evaluate()")
    model = draft.entries["model.path"]
    place = "MODEL" if model.stands_in else model.value
    return f"proxima eval {place} RECIPE.yaml, where RECIPE.yaml is this file"


# paths of things that need to exist only on the machine that trains
OPENED_LATER = ("model.", "critic.path", "task", "eval.", "data.", "monitor.")


def make_loadable(draft: Draft) -> tuple[str, ...]:
    """Turn values that a recipe refuses into values to fill in; return the remaining problems."""
    replaced: dict[str, str] = {}
    while problems := list(problems_of(draft.filled)):
        refused = [p for p in problems if p.path in draft.entries and not p.path.endswith(".kind")]
        if not refused:
            break
        for problem in refused:
            entry = draft.entries.pop(problem.path)
            why = f"{entry.origin.removeprefix(FILL_IN)}: {problem.value} {problem.message}; our default is used"
            replaced[problem.path] = why
            draft.needs(problem.path, why)
    if replaced and not problems:
        resolved = resolve(draft.filled, root=None, import_code=False)
        for path, why in replaced.items():
            value = resolved.get(path)
            if is_leaf(value):
                draft.entries[path] = Entry(value, on_one_line(f"{FILL_IN}: {why}"))
    return tuple(str(problem).replace(" (mapping)", "") for problem in problems)


def is_leaf(value: Any) -> bool:
    """Return True for a value that a recipe writes in one place, and that is one."""
    return isinstance(value, str | int | float | bool)


def problems_of(recipe: dict[str, Any]) -> Iterator[Problem]:
    """The problems that stop the recipe; opens no file and no reward model, and imports no code."""
    rewards = [_unopened(reward) for reward in recipe.get("reward", ())]
    if rewards:
        recipe = recipe | {"reward": rewards}
    try:
        resolved = resolve(recipe, root=None, import_code=False)
    except ConfigError as error:
        yield from error.problems
        return
    yield from (problem for problem in check(resolved) if not problem.path.startswith(OPENED_LATER))


def _unopened(reward: dict[str, Any]) -> dict[str, Any]:
    """The reward, or for a reward model a stand-in of the same name that needs no weights."""
    if reward["kind"] != "model":
        return reward
    return {"kind": "length", "name": reward.get("name", reward["path"].rpartition(":")[2])}
