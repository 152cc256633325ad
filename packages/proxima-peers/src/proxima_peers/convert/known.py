"""The rules for options that no converter reads: a table for each peer, in `options/*.yaml`.

    no effect    nothing here depends on them, whatever their value
    changes      they would change the result and have no equivalent; harmless if unset or at the neutral value given
                 in the table
    part of      read by the peer only together with another option, the key (`option`, or `option=value`)
    to fill in   as `changes`, but our field only needs a value that the file can't contain, such as the data's size
    copies       copies of another option, the key, whose value is used for both here; harmless if they are equal
    waits        the field to fill in for an option above that names code or data and is not neutral
    training     `marks` of a training with rewards; `others` mark another training, `unless` one of these is also set

A section is a reason with, for each prefix, names separated by blanks, or names with their neutral values; `{a,b}`
matches either. Names are exact: a misspelling is an unknown option, never one without effect. `*` is used only where
no name inside can change a number (profilers, classes of the peer's config), where any of them would (arguments of
another program), or for a part.
"""

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from proxima.config.scalars import Loader
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Leftover, Options, on_one_line
from proxima_peers.convert.read_script import Doubtful

Effect = Literal["no effect", "changes", "part of", "copies", "to fill in"]
FILES = (".py", ".jsonl", ".json", ".parquet", ".arrow", ".csv", ".jinja", ".yaml", ".yml")
OWN_CLASSES = ("verl", "unirl", "hydra", "torch", "omegaconf", "transformers", "builtins")  # not the user's packages
OFF = ("no", "none", "disabled", "sync", "off", "null", "false")


@dataclass(frozen=True)
class Rule:
    """The reason why an option has no field of ours, or, for `part of`, the option that it belongs to.

    Args:
        effect: the section of the table.
        why: the reason, or the key of `part of` and `copies`.
        neutral: values with which an option of `changes` is harmless, besides being unset.
        field: the recipe's field that the user has to fill in for an option that names code or data.
    """

    effect: Effect
    why: str
    neutral: tuple[Any, ...] = ()
    field: str = ""


Rules = dict[str, Rule]  # by name, or pattern with `*`


@cache
def option_rules(peer: str) -> Rules:
    """The rules of a peer, by name or pattern with `*`."""
    rules: dict[str, Rule] = {}
    for effect, reasons in _table(peer).items():
        if effect in ("training", "waits"):
            continue
        for why, prefixes in reasons.items():
            for name, neutral in _names(prefixes):
                if isinstance(neutral, list):
                    values = tuple(neutral)
                else:
                    values = (neutral,)
                rules.setdefault(name, Rule(effect, why, values))
    for field, prefixes in _table(peer).get("waits", {}).items():
        for name, _ in _names(prefixes):
            rules[name] = replace(rules[name], field=field)
    return rules


def _names(prefixes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names of a section, each with its neutral value."""
    for prefix, names in prefixes.items():
        if isinstance(names, str):
            neutral = dict.fromkeys(names.split())
        else:
            neutral = names
        for name, value in neutral.items():
            for start, end in itertools.product(_either(prefix), _either(name)):
                dot = "." if start and not start.endswith(".") else ""
                yield f"{start}{dot}{end}", value


@cache
def _table(peer: str) -> dict[Any, Any]:
    file = files("proxima_peers.convert") / "options" / f"{peer}.yaml"
    text = file.read_text(encoding="utf-8")
    table: dict[Any, Any] = yaml.load(text, Loader=Loader)
    return table


def not_a_training(o: Options, peer: str) -> str | None:
    """The reason why the file is not a training with rewards of this peer; None if it is one."""
    marks, others, unless = (_table(peer)["training"].get(key, "").split() for key in ("marks", "others", "unless"))
    if not any(fnmatch.fnmatchcase(name, mark) for name in o.flat for mark in marks):
        return "sets none of its options"
    other = next((name for name in others if o.flat.get(name) is not None), None)
    if other is None or any(name in o.flat for name in unless):
        return None
    return f"sets {other}, of another training (SFT, preferences, reward models)"


def _either(text: str) -> Iterator[str]:
    """`a.{b,c}` → `a.b`, `a.c`."""
    brace = re.search(r"\{([^{}]*)\}", text)
    if not brace:
        yield text
        return
    for choice in brace[1].split(","):
        yield from _either(text[: brace.start()] + choice + text[brace.end() :])


def sort_out(d: Draft, o: Options, table: Rules) -> None:
    """Record each option that no converter read, by its rule or as unknown."""
    names = {*table, *o.asked}
    for name in o.left():
        rule = _rule(name, table)
        if rule is not None:
            _tell(d, o, name, rule)
        elif _is_nothing(o.flat[name]) and any(other.startswith(f"{name}.") for other in names):
            d.drops(name, "off, or neutral")  # a section without its options
        else:
            _unknown(d, o, name, table)


def _rule(name: str, table: Rules) -> Rule | None:
    """The rule of an option: under its name, else under the first pattern that it matches."""
    if name in table:
        return table[name]
    for pattern, rule in table.items():
        if "*" in pattern and fnmatch.fnmatchcase(name, pattern):
            return rule
    return None


def _tell(d: Draft, o: Options, name: str, rule: Rule) -> None:
    """Record one option by its rule."""
    value = o.flat[name]
    if rule.effect == "part of":
        if _is_on(o, rule.why):
            _lacks_whole(d, name, value, rule)
        else:
            d.drops(name, f"read with {rule.why} only")
    elif rule.effect == "copies":
        other = o.flat.get(rule.why)
        if _is_nothing(value) or value == other:
            d.drops(name, f"as {rule.why}")
        else:
            _lacks(d, name, f"{shown(value)}: {rule.why}, {shown(other)}, holds here", rule.field)
    elif rule.effect == "no effect":
        if rule.field and isinstance(value, str) and value.partition(".")[0] not in OWN_CLASSES:
            d.wait(rule.field, name, f"{shown(value)}: a custom class, which nothing here runs")
        else:
            d.drops(name, rule.why)
    elif _is_nothing(value) or value in rule.neutral:
        d.drops(name, "off, or neutral")
    elif rule.effect == "to fill in":
        d.missing.append(Leftover(name, f"{shown(value)}: {rule.why}"))
    else:
        _lacks(d, name, f"{shown(value)}: {rule.why}", rule.field)


def _lacks_whole(d: Draft, name: str, value: Any, rule: Rule) -> None:
    """Record an option that is part of another one, which is on and has no equivalent."""
    why = f"part of {rule.why}, which has no equivalent"
    if not rule.field:
        d.lacks(name, why)
    elif _is_nothing(value):
        d.lacks(name, f"{shown(value)}: {why}")
    else:
        d.wait(rule.field, name, f"{shown(value)}: {why}")


def _lacks(d: Draft, name: str, why: str, field: str) -> None:
    """Record an unsupported option; if it names code or data, the user has to fill in `field`."""
    if field:
        d.wait(field, name, why)
    else:
        d.lacks(name, why)


def _unknown(d: Draft, o: Options, name: str, table: Rules) -> None:
    """Record an option that the peer does not have as far as we know; if it names a file, user code may read it."""
    why = _nearest(name, o, table)
    if str(o.flat[name]).partition("::")[0].endswith(FILES):
        field = "reward" if "reward" in name else "task"
        d.wait(field, name, f"{shown(o.flat[name])}: names a file, and {why}")
    else:
        d.unknown.append(Leftover(name, why))


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and value in ("", [], {}, "null", "None"))


def _is_on(o: Options, condition: str) -> bool:
    name, equals, value = condition.partition("=")
    written = o.flat.get(name)
    if equals:
        return str(written) == value
    return not (_is_nothing(written) or written is False or written == 0 or str(written).lower() in OFF)


def shown(value: Any) -> str:
    """A value as printable text of at most 60 characters."""
    if isinstance(value, Doubtful):
        value = value.why
    text = on_one_line(str(value))
    if len(text) > 60:
        return f"{text[:59]}…"
    return text


def _nearest(name: str, o: Options, table: dict[str, Rule]) -> str:
    """Suggest the option probably meant: a similar name in the same section, or the same name in another section."""
    names = o.asked | {other for other in table if "*" not in other}
    section, _, last = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in sorted(names) if other.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, beside, n=1, cutoff=0.7)
    elsewhere = sorted(other for other in names if other.rpartition(".")[2] == last)
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    matches = [beside[last_part] for last_part in near] or elsewhere or similar
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"{o.peer} has no such option that we know"
