"""What becomes of the options that no converter reads: a table for each peer, in `options/*.yaml`.

    no effect    nothing here depends on them, whatever their value
    changes      they would change the result and have no equivalent; harmless while they have the neutral value beside
                 them, or none
    part of      read by the peer together with another option only, the key (`option`, or `option=value`)
    to fill in   as `changes`, but our field waits only for what the file can't say, as the size of the data
    copies       of another option, the key, which holds for both here; harmless where they are equal
    training     `marks` of a training with rewards, and of `others`, which it does not set `unless` with these

A section is a reason with, for each prefix, names separated by blanks, or names with their neutral values; `{a,b}`
stands for either. Names are exact: a misspelling is an unknown option, never one without effect. `*` stands only where
no name inside can change a number (profilers, classes of the peer's config), where any of them would (arguments of
another program), or for a part.
"""

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from proxima.config.scalars import Loader
from proxima.peers.convert.options import Leftover, Options
from proxima.peers.convert.read_script import Doubtful

Effect = Literal["no effect", "changes", "part of", "copies", "to fill in"]
OFF = ("no", "none", "disabled", "sync", "off", "null", "false")


@dataclass(frozen=True)
class Rule:
    """Why an option has no field of ours, or, for `part of`, the option that it belongs to.

    Args:
        effect: the section of the table.
        why: the reason, or the key of `part of` and `copies`.
        neutral: values with which an option of `changes` is harmless, besides none at all.
    """

    effect: Effect
    why: str
    neutral: tuple[Any, ...] = ()


Rules = dict[str, Rule]  # by name, or pattern with `*`


@cache
def option_rules(peer: str) -> Rules:
    """Name, or pattern with `*`, → rule."""
    found: dict[str, Rule] = {}
    for effect, reasons in _table(peer).items():
        if effect == "training":
            continue
        for why, prefixes in reasons.items():
            for prefix, names in prefixes.items():
                for name in names.split() if isinstance(names, str) else names:
                    neutral = None if isinstance(names, str) else names[name]
                    values = tuple(neutral) if isinstance(neutral, list) else (neutral,)
                    for start, end in itertools.product(_either(prefix), _either(name)):
                        dot = "." if start and not start.endswith(".") else ""
                        found.setdefault(f"{start}{dot}{end}", Rule(effect, why, values))
    return found


@cache
def _table(peer: str) -> dict[Any, Any]:
    text = (files("proxima.peers.convert") / "options" / f"{peer}.yaml").read_text(encoding="utf-8")
    table: dict[Any, Any] = yaml.load(text, Loader=Loader)
    return table


def not_a_training(o: Options, peer: str) -> str | None:
    """Why the file is no training with rewards of this peer; None where it is one."""
    marks, others, unless = (_table(peer)["training"].get(key, "").split() for key in ("marks", "others", "unless"))
    if not any(fnmatch.fnmatchcase(name, mark) for name in o.flat for mark in marks):
        return "sets none of its options"
    other = next((name for name in others if o.flat.get(name) is not None), None)
    if other is None or any(name in o.flat for name in unless):
        return None
    return f"sets {other}, of another training (SFT, preferences, reward models)"


def _either(text: str) -> Iterator[str]:
    """`a.{b,c}` → `a.b`, `a.c`."""
    if not (brace := re.search(r"\{([^{}]*)\}", text)):
        yield text
        return
    for choice in brace[1].split(","):
        yield from _either(text[: brace.start()] + choice + text[brace.end() :])


def sort_out(o: Options, table: Rules) -> tuple[list[Leftover], ...]:
    """The options that no converter read: ignored (no effect here), unsupported, unknown, to fill in."""
    ignored: list[Leftover] = []
    unsupported: list[Leftover] = []
    unknown: list[Leftover] = []
    missing: list[Leftover] = []
    patterns = [name for name in table if "*" in name]
    known = {*table, *o.asked}
    for name in o.left():
        found = name if name in table else next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if found is None and _is_nothing(o.flat[name]) and any(other.startswith(f"{name}.") for other in known):
            ignored.append(Leftover(name, "off, or neutral"))  # a section without its options
            continue
        if found is None:
            unknown.append(Leftover(name, _nearest(name, o, table)))
            continue
        rule = table[found]
        if rule.effect == "part of":
            on = _is_on(o, rule.why)
            why = f"part of {rule.why}, which has no equivalent" if on else f"read with {rule.why} only"
            (unsupported if on else ignored).append(Leftover(name, why))
        elif rule.effect == "copies":
            other = o.flat.get(rule.why)
            if _is_nothing(o.flat[name]) or o.flat[name] == other:
                ignored.append(Leftover(name, f"as {rule.why}"))
            else:
                unsupported.append(Leftover(name, f"{shown(o.flat[name])}: {rule.why}, {shown(other)}, holds here"))
        elif rule.effect == "no effect":
            ignored.append(Leftover(name, rule.why))
        elif _is_nothing(o.flat[name]) or o.flat[name] in rule.neutral:
            ignored.append(Leftover(name, "off, or neutral"))
        else:
            told = missing if rule.effect == "to fill in" else unsupported
            told.append(Leftover(name, f"{shown(o.flat[name])}: {rule.why}"))
    return ignored, unsupported, unknown, missing


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and value in ("", [], {}, "null", "None"))


def _is_on(o: Options, condition: str) -> bool:
    name, equals, value = condition.partition("=")
    written = o.flat.get(name)
    if equals:
        return str(written) == value
    return not (_is_nothing(written) or written is False or written == 0 or str(written).lower() in OFF)


def shown(value: Any) -> str:
    """A value in a line of text, cut short; printable."""
    written = value.why if isinstance(value, Doubtful) else str(value)
    text = "".join(letter if letter.isprintable() else " " for letter in written)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _nearest(name: str, o: Options, table: dict[str, Rule]) -> str:
    """The option probably meant: a similar name in the same section, or the same name in another section."""
    known = o.asked | {other for other in table if "*" not in other}
    section, _, last = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in sorted(known) if other.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, beside, n=1, cutoff=0.7)
    elsewhere = sorted(other for other in known if other.rpartition(".")[2] == last)
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    found = [beside[one] for one in near] or elsewhere or similar
    return f"did you mean {found[0]!r}?" if found else f"{o.peer} has no such option that we know"
