"""Converts another framework's options to a recipe: each value with its origin, options without an equivalent listed.

    read*.py, shell.py   file → options by dotted name
    options.py   which of them a converter read, and could not take
    verl*.py, trl*.py, areal.py, unirl.py            the files of each peer: `convert(options) -> Draft`
    trl_offline.py, trl_gkd.py, areal_offline.py, verl_sft.py    their trainings without rewards, of further tables
    verl_reward.py, verl_dapo.py, trl_rewards.py     what scores a completion
    known.py     options without an equivalent, by the tables in options/*.yaml: without effect, or a change of results
    common.py, adapter.py, trackers.py    conversions that peers share; `model.lora`; `monitor`
    rollout_servers.py    `engine` where the peer generates with a server
    openrlhf.py    the refusal of a peer that is not read
    draft.py     the recipe under construction, and its text
Where a peer means something else by a number, the number is converted and a note says so; no code of the peer is
imported or executed.
Imports: pyyaml, `proxima.config` and the tables it names. Imported by `cli`.
To add a peer: a file with `convert`, a line in `PEERS`, a table in `options`, an example in `tests/examples`,
rows in `docs/migration.md`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.config import ConfigError, check, resolve
from proxima.config.problems import Problem, one_problem
from proxima.config.tree import FILL_IN
from proxima_peers.convert import areal, areal_offline, trl, trl_offline, unirl, verl, verl_sft
from proxima_peers.convert.draft import TITLES, Draft
from proxima_peers.convert.known import Rules, not_a_training, option_rules, sort_out
from proxima_peers.convert.openrlhf import openrlhf_is_not_read, refuse_openrlhf
from proxima_peers.convert.options import Leftover, Options
from proxima_peers.convert.read import read

PEERS: dict[str, tuple[str, Callable[[Options], Draft]]] = {
    "areal": ("AReaL", areal.convert),
    "trl": ("TRL", trl.convert),
    "unirl": ("UniRL", unirl.convert),
    "verl": ("verl", verl.convert),
}
# Trainings without rewards: which of them a file is, if any; its conversion; and the rules of its options.
OFFLINE: dict[str, tuple[Callable[[Options], str | None], Callable[[Options, str], Draft], Callable[[Options], Rules]]]
OFFLINE = {
    "areal": (areal_offline.command_of_areal, areal_offline.convert_areal_offline, areal_offline.areal_rules),
    "trl": (trl_offline.command_of_trl, trl_offline.convert_offline, trl_offline.trl_rules),
    "verl": (verl_sft.command_of_verl, verl_sft.convert_sft, verl_sft.verl_sft_rules),
}


@dataclass(frozen=True)
class Conversion:
    """A converted recipe.

    Args:
        recipe: plain dicts and lists, as `proxima.config.resolve` takes them.
        text: the same as YAML, each value with its origin; options without an equivalent are comments at the top.
        missing, unsupported, unknown, ignored: values that the file does not give; options without an equivalent.
        read: options that decided fields without being named by one.
        problems: why the recipe would not resolve or run here; empty when it would.
        report: the five lists, for a terminal.
    """

    recipe: dict[str, Any]
    text: str
    missing: tuple[Leftover, ...]
    unsupported: tuple[Leftover, ...]
    unknown: tuple[Leftover, ...]
    ignored: tuple[Leftover, ...]
    read: tuple[Leftover, ...]
    problems: tuple[str, ...]
    report: tuple[str, ...]


def likely_peers(path: str | Path) -> list[str]:
    """The peers, keys of `PEERS`, of whose options the file sets some, and fewest unknown ones: mostly one; empty if it
    is none of theirs. ConfigError if the file can't be read."""
    options = read(Path(path))
    refuse_openrlhf(path, options)
    named = {peer: Options(name, options, str(path)) for peer, (name, _) in PEERS.items()}
    fits = [peer for peer, o in named.items() if _offline(o, peer) is not None or not not_a_training(o, peer)]
    unknown = {peer: len(convert(path, peer).unknown) for peer in fits}
    return [peer for peer in fits if unknown[peer] == min(unknown.values())]


def convert(path: str | Path, peer: str) -> Conversion:
    """Convert a file of `peer`, a key of `PEERS`; `openrlhf` is refused with the page that helps.

    Raises:
        ConfigError: the file can't be read, or is no training of that peer that is converted.
    """
    if peer == "openrlhf":
        raise openrlhf_is_not_read(path)
    framework, converter = PEERS[peer]
    o = Options(framework, read(Path(path)), str(path))
    refuse_openrlhf(path, o.flat)
    rules = option_rules(peer)
    if (command := _offline(o, peer)) is not None:
        _, of_command, rules_of = OFFLINE[peer]
        converter, rules = lambda options: of_command(options, command), rules_of(o)
    elif (why := not_a_training(o, peer)) is not None:
        wanted = "name the framework with --from, and give its configuration of a training with rewards"
        if len(others := likely_peers(path)) == 1:
            wanted = f"it looks like one of {PEERS[others[0]][0]}: --from {others[0]}"
        raise one_problem(o.file, f"is no such configuration of {framework}: it {why}; {wanted}")
    for name in ("config", "defaults", "launch"):  # what comes first and is not here is in doubt
        o.get(name)
    draft = converter(o)
    draft.doubt(o)
    sort_out(draft, o, rules)
    problems = make_loadable(draft)
    draft.account(o)
    recipe = draft.tree()
    draft.ignored[:] = dict.fromkeys(draft.ignored)  # once each
    head = f"Made by `proxima convert {path} --from {peer}`: each value is followed by the option it came from."
    if problems:
        head += "\nAs it stands: " + "; ".join(problems)
    leftovers = {name: tuple(getattr(draft, name)) for name in TITLES}
    return Conversion(recipe, draft.text(head), **leftovers, problems=problems, report=tuple(draft.report()))


def _offline(o: Options, peer: str) -> str | None:
    """The training without rewards that the file is; None: another."""
    return OFFLINE[peer][0](o) if peer in OFFLINE else None


# what needs to exist only on the machine that trains
OPENED_LATER = ("model.", "critic.path", "task", "eval.", "data.", "monitor.")


def make_loadable(draft: Draft) -> tuple[str, ...]:
    """Leave out the values that no recipe may have, as to fill in; the problems that are left."""
    while problems := list(problems_of(draft.tree())):
        refused = [one for one in problems if one.path in draft.entries and not one.path.endswith(".kind")]
        if not refused:
            break
        for problem in refused:
            entry = draft.entries.pop(problem.path)
            why = f"{entry.origin.removeprefix(FILL_IN)}: {problem.value} {problem.message}; our default stands in"
            draft.needs(problem.path, why)
    return tuple(str(problem).replace(" (mapping)", "") for problem in problems)


def problems_of(recipe: dict[str, Any]) -> Iterator[Problem]:
    """What stops the recipe; opens no file and no reward model, and imports no code."""
    rewards = [_unopened(one) for one in recipe.get("reward", ())]
    try:
        resolved = resolve(recipe | ({"reward": rewards} if rewards else {}), root=None, import_code=False)
    except ConfigError as error:
        yield from error.problems
        return
    yield from (problem for problem in check(resolved) if not problem.path.startswith(OPENED_LATER))


def _unopened(reward: dict[str, Any]) -> dict[str, Any]:
    """A reward of the same name that needs no weights."""
    if reward["kind"] != "model":
        return reward
    return {"kind": "length", "name": reward.get("name", reward["path"].rpartition(":")[2])}


__all__ = ["PEERS", "Conversion", "Leftover", "convert", "likely_peers"]
