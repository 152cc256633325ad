"""Options of a launch script: its `a.b=value` words, or the `--name value` of its command. Nothing is executed."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from proxima.config.problems import one_problem
from proxima.config.scalars import Loader
from proxima.peers.convert.read_python import literal

Flat = dict[str, Any]
ROUNDS = 10  # how deep references may nest; ends a circle


@dataclass(frozen=True)
class Doubtful:
    """Stands for a value that the file does not settle, and says why."""

    why: str


_VALUE = r"""\$\(\(.*?\)\)|\$\{\w+:?-"[^"]*"\}|"[^"]*"|'[^']*'|[^\s("';]*"""
_ASSIGNMENT = re.compile(rf"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=({_VALUE})\s*;?\s*(?:\#.*)?")
_IN_BRANCH = re.compile(
    rf"(?:^|[;)]|&&|\|\||\b(?:then|else)\b)\s*(?:export\s+)?([A-Za-z_]\w*)=({_VALUE})(?=\s*(?:;|$|\#))"
)  # an assignment among the statements of a line
_OPENS = re.compile(r"(?:^|;|&&|\|\||\bthen|\bdo|\belse)\s*(?:if|case)\b")
_CLOSES = re.compile(r"(?:^|;|\s)(?:fi|esac)\b(?=\s*(?:$|[;)|#]))")
_ARRAY = re.compile(r"\s*[A-Za-z_]\w*\+?=\((.*)")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/]*(?:\.[\w@/]+)+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_MAINS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "torch.distributed.run", "accelerate.commands.launch")
_PROGRAMS = ("python", "python3", "accelerate", "torchrun", "trl", "deepspeed", "uv", "CUDA_VISIBLE_DEVICES")


def from_script(text: str, name: str = "script") -> Flat:
    """The `a.b=value` words of a shell script, else the `--name value` of its commands.

    Expands its variables: `$n`, `${n}`, `${n:-default}`, `$((1024 * 20))`; `$HOME` is `~`. What depends on a branch
    (`if`, `case`), or differs between two commands, is `Doubtful` with the values it may have.

    Raises:
        ConfigError: the script has no such word.
    """
    script = _Script()
    for line in re.sub(r"\\\n", " ", text).splitlines():
        script.read(line)
    flat = script.overrides or script.flags
    if not flat:
        wanted = "give the config file, or the script that sets the options"
        raise one_problem(name, f"has no words like algorithm.adv_estimator=grpo or --learning_rate 1e-6; {wanted}")
    if script.overrides and script.mains:
        why = f"{' and '.join(script.mains)} may have defaults of its own, which are not in this file"
        flat = {"launch": Doubtful(why), **flat}
    if script.overrides and "config" in script.flags:  # AReaL: --config FILE a.b=value
        flat = {"config": script.flags["config"], **flat}
    return flat


@dataclass
class _Script:
    """What has been read of a script, line by line."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~", "PWD": "."})
    branches: dict[str, list[str]] = field(default_factory=dict)  # variable → the values it may have
    overrides: Flat = field(default_factory=dict)
    flags: Flat = field(default_factory=dict)
    written: dict[str, tuple[str, int]] = field(default_factory=dict)  # option → its text, and by which command
    depth: int = 0  # of if and case
    commands: int = 0
    mains: list[str] = field(default_factory=list)  # modules that are run, other than the peers' own

    def read(self, line: str) -> None:
        line = line.strip()
        if line.startswith("#"):
            return
        opens, closes = len(_OPENS.findall(line)), len(_CLOSES.findall(line))
        inside = self.depth > 0 or opens > 0
        self.depth = max(0, self.depth + opens - closes)
        if assignment := _ASSIGNMENT.fullmatch(line):
            self.assign(assignment[1], _unquoted(assignment[2]), inside)
            return
        for found in _IN_BRANCH.finditer(line):
            self.assign(found[1], _unquoted(found[2]), True)
        self.options(line, inside)

    def assign(self, name: str, value: str, inside: bool) -> None:
        """Set a variable; inside of a branch it may have any of its values afterwards."""
        value = self.expanded(value)
        if not inside:
            self.variables[name] = value
            self.branches.pop(name, None)
        elif self.variables.get(name) != value:
            before = [self.variables.pop(name)] if name in self.variables else []
            self.branches[name] = list(dict.fromkeys([*self.branches.get(name, before), value]))

    def options(self, line: str, inside: bool) -> None:
        """Keep the options among the words of a line."""
        array = _ARRAY.fullmatch(line)
        words = _words(array[1].removesuffix(")") if array else line)
        program = bool(words) and not array and not words[0].startswith("--") and not _OVERRIDE.fullmatch(words[0])
        self.commands += program
        command = self.commands if program else 0
        for word in words:
            if found := _OVERRIDE.fullmatch(word):
                self.keep(self.overrides, found[1], found[2], inside, command)
        if "-m" in words[:-1] and (module := words[words.index("-m") + 1]) not in _MAINS and "." in module:
            self.mains.append(module)
        if words and (array or words[0] in _PROGRAMS or words[0].startswith("--") or "=" in words[0]):
            for name, text in _flags(words):
                self.keep(self.flags, name, text, inside, command)

    def keep(self, into: Flat, name: str, text: str, inside: bool, command: int) -> None:
        """Set an option: in a branch, and by another command to another value, it is in doubt."""
        text = self.expanded(text)
        before, other = self.written.get(name, (None, command))
        self.written[name] = (text, command)
        if (inside and before != text) or (
            before not in (None, text) and 0 not in (command, other) and other != command
        ):
            values = [one for one in (before, text) if one is not None]
            into[name] = Doubtful(f"the script has {' or '.join(values)}, by a branch or command")
        elif unset := re.findall(r"\$\{?(\w+)", text):
            why = [f"{one} is {' or '.join(self.branches[one])}" for one in unset if one in self.branches]
            into[name] = Doubtful(f"the script has {text}{': ' if why else ''}{', '.join(why)}")
        else:
            into.update(_typed(name, text))

    def expanded(self, text: str) -> str:
        for _ in range(ROUNDS):
            before = text
            text = _ARITHMETIC.sub(self._arithmetic, _VARIABLE.sub(self._variable, text))
            if text == before:
                break
        return text

    def _variable(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if values := self.branches.get(name):  # a default would hide them
            return values[0] if len(values) == 1 and default is None else f"${{{name}}}"
        value = self.variables.get(name, match[0] if default is None else _unquoted(default))
        return value or _unquoted(default or "")

    def _arithmetic(self, match: re.Match[str]) -> str:
        inside = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: self.variables.get(m[0], m[0]), match[1])
        found = _computed(inside)
        return match[0] if found is None else f"{found:.0f}"


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote over several lines: not a line of options
        return []


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """`--a-b 1 --c --d=x y` as (a_b, 1), (c, true), (d, x); several values as a list."""
    for index, word in enumerate(words):
        if not (found := _FLAG.fullmatch(word)):
            continue
        name = found[1].replace("-", "_")
        if found[2] is not None:
            yield name, found[2]
            continue
        values = []
        for value in words[index + 1 :]:
            if value.startswith("--") or value.endswith(".py") or value in ("|", "2>&1", "&", ">"):
                break
            if _OVERRIDE.fullmatch(value):
                break
            values.append(value.rstrip(","))
        yield name, "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _typed(name: str, text: str) -> Flat:
    try:
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError:
        value = text
    return dict(flattened(value, f"{name}.")) if isinstance(value, Mapping) and value else {name: value}


def flattened(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf."""
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        else:  # `???` is OmegaConf's mark of a value that must be given elsewhere
            yield name, None if value == "???" else value


_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


def _computed(text: str) -> float | None:
    try:
        found = literal(ast.parse(text.strip(), mode="eval").body, {})
    except (SyntaxError, ValueError):
        return None
    return float(found) // 1 if isinstance(found, int | float) else None
