"""Options of a launch script: its `a.b=value` words, or the `--name value` of its command. Nothing is executed."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from proxima.config.problems import one_problem
from proxima.config.scalars import Loader
from proxima_peers.convert.read_python import literal
from proxima_peers.convert.shell import Statement, statements

Flat = dict[str, Any]
ROUNDS = 10  # maximum nesting of references; stops a cycle
LONGEST = 20_000  # maximum characters of a value


@dataclass(frozen=True)
class Doubtful:
    """Placeholder for a value that the file does not determine, with the reason."""

    why: str


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/]*(?:\.[\w@/]+)*)=(.*)", re.DOTALL)
_DOTTED = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/]*(?:\.[\w@/]+)+=")  # the beginning of an override of an option inside
_DEFAULT = re.compile(r"\$\{(\w+):?=(.*)\}", re.DOTALL)  # `: "${NAME:=value}"`
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[@\])?\}?")
_DELETED = re.compile(r"~([A-Za-z_]\w*(?:\.\w+)+)")  # Hydra's way to leave an option out
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_HERE = re.compile(  # the folder of the script, or the one it runs in
    r"\$\(\s*(?:pwd|dirname\s+[^()]+|cd\s.+?&&\s*pwd(?:\s+-P)?)\s*\)|`pwd`"
)
_LAUNCHER = re.compile(r"(?:.*/)?run_experiment\w*\.sh")  # of UniRL: the name of a config, and options
# Their defaults are known, or in the config that they name.
_MAINS = (
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_sync",
    "torch.distributed.run",
    "accelerate.commands.launch",
    "skyrl.train.entrypoints.main_base",
    "skyrl_train.entrypoints.main_base",
    "examples.train.fully_async.main_fully_async",
)
_SERVERS = (  # not trainings
    "vllm-serve",
    "serve",
    "vllm.entrypoints.openai.api_server",
    "sglang.launch_server",
    "skyrl.train.entrypoints.serve",
)
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_KEYWORDS = ("then", "else", "do", "{", "}", "!", "time", "exec", "nohup")  # a command follows
_SHELLS = ("bash", "sh", "zsh")
_CONDITIONS = ("if", "elif", "while", "until")


def from_script(text: str, name: str = "script") -> Flat:
    """The `a.b=value` words of a shell script, else the `--name value` of its commands.

    Expands its variables: `$n`, `${n}`, `${n:-default}`, `$((1024 * 20))`; `$HOME` is `~`. A value that depends on a
    branch (`if`, `case`) or a loop, or differs between two commands, is `Doubtful` with its possible values.

    Raises:
        ConfigError: the script has no such word.
    """
    script = _Script()
    for statement in statements(text):
        script.read(statement)
    overrides = script.settled(script.overrides)
    flags = script.settled(script.flags)
    if not overrides:
        if flags:
            return flags
        wanted = "give the config file, or the script that sets the options"
        raise one_problem(name, f"has no words like algorithm.adv_estimator=grpo or --learning_rate 1e-6; {wanted}")
    why = []
    if script.mains:
        why.append(f"{' and '.join(script.mains)} may have its own defaults")
    why += [f"${name} may hold options" for name in script.missing()]
    if why:
        overrides = {"launch": Doubtful(f"{' and '.join(why)}, which are not in this file")} | overrides
    own = {flag: flags[flag] for flag in script.own if flag in flags}
    return own | overrides


def variables_of_command(text: str) -> Flat:
    """The environment variables that a shell script gives the command that trains: those before it, and exported ones.

    A value that depends on a branch, or differs between two such commands, is `Doubtful` with its possible values.
    """
    script = _Script()
    for statement in statements(text):
        script.read(statement)
    environment: Flat = {}
    for name, values in script.environment().items():
        if len(values) > 1:
            environment[name] = Doubtful(f"the script sets {name} to {' or '.join(values)}, by a branch or command")
        elif "$" in values[0] or "`" in values[0]:
            environment[name] = Doubtful(f"the script sets {name} to {values[0]}")
        else:
            environment[name] = values[0]
    return environment


Occurrences = list[tuple[int, str, bool]]  # of an option: its command, the text, and whether it is in a branch


@dataclass
class _Script:
    """The state of reading a script statement by statement.

    Args:
        branches: variable → its possible values.
        overrides, flags: option → where the script sets it.
        commands: the module or file that each command runs; "" for arrays, the first.
        depth: of if, case and loops.
        own: flags of the program itself, `--config` in `x.py --config`.
        mains: modules that are run, other than the peers' own.
        exported: names of variables.
        around: variables before `bash -c`, inside it.
        environments: command → variable → its possible values.
        spread: variables and arrays among options.
    """

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~", "PWD": "."})
    branches: dict[str, list[str]] = field(default_factory=dict)
    overrides: dict[str, Occurrences] = field(default_factory=dict)
    flags: dict[str, Occurrences] = field(default_factory=dict)
    commands: list[str] = field(default_factory=lambda: [""])
    depth: int = 0
    own: dict[str, None] = field(default_factory=dict)
    mains: dict[str, None] = field(default_factory=dict)
    exported: set[str] = field(init=False, default_factory=set)
    around: dict[str, str] = field(init=False, default_factory=dict)
    environments: dict[int, dict[str, list[str]]] = field(init=False, default_factory=dict)
    arrays: set[str] = field(init=False, default_factory=set)
    spread: dict[str, None] = field(init=False, default_factory=dict)

    def read(self, statement: Statement) -> None:
        words = statement.words
        if statement.array is not None:
            self.arrays.add(statement.array)
            self.options(words, 0)
            return
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        first = words[0] if words else ""
        if first in ("fi", "esac", "done"):
            self.depth = max(0, self.depth - 1)
        elif first in ("if", "case", "while", "until", "for", "select"):
            self.depth += 1
        if first == "for" and words[2:3] == ["in"]:
            self.variables.pop(words[1], None)
            self.branches[words[1]] = [self.expanded(word) for word in words[3:]]
        elif first not in ("for", "case", *_CONDITIONS):
            self.command(words)

    def command(self, words: list[str]) -> None:
        """Assignments, or a program with its options."""
        if words[:1] == [":"]:  # sets variables that nothing has set
            for default in filter(None, map(_DEFAULT.fullmatch, words[1:])):
                if default[1] not in self.variables and default[1] not in self.branches:
                    self.assign(default[1], _unquoted(default[2]))
            return
        if words and words[0] in _DECLARES:
            exports = words[0] == "export" or "-x" in words
            words = [word for word in words[1:] if not word.startswith("-")]
            if exports:
                self.exported.update(word.partition("=")[0] for word in words)
            words = [word for word in words if "=" in word]
        assigned = [_ASSIGNMENT.fullmatch(word) for word in words]
        if all(assigned):
            for assignment in assigned:
                assert assignment is not None
                self.assign(assignment[1], assignment[2])
            return
        if words[0] == "env" and len(words) > 1 and _ASSIGNMENT.fullmatch(words[1]):
            words = words[1:]
        environment: dict[str, str] = {}
        while words and (own := _ASSIGNMENT.fullmatch(words[0])):  # an environment for this command
            environment[own[1]] = own[2]
            words = words[1:]
        if not words:
            return
        words = _of_launcher(words, environment.get("EXPERIMENT", self.variables.get("EXPERIMENT")))
        # ray job submit … -- python …
        if "--" in words[:-1]:
            words = words[words.index("--") + 1 :]
        if len(words) > 2 and words[0] in _SHELLS and re.fullmatch(r"-\w*c", words[1]):
            outside = self.around
            self.around = outside | environment
            for statement in statements(words[2]):
                self.read(statement)
            self.around = outside
            return
        self.program(words, environment)

    def program(self, words: list[str], environment: dict[str, str]) -> None:
        """A program with its options, in its environment."""
        words, doubtful = self.split(words)
        start, program, module = _program(words)
        if any(word in _SERVERS for word in (*words[1:3], program)):
            return
        own_config = module in _MAINS or module.startswith("unirl.train_")
        if "." in module and not own_config and any(_OVERRIDE.fullmatch(word) for word in words):
            self.mains[module] = None
        command = len(self.commands)
        self.commands.append(program or words[0])
        self.environments[command] = self.given(self.around | environment)
        self.options(words, command, start)
        self.options(doubtful, command, -1, doubtful=True)

    def given(self, own: dict[str, str]) -> dict[str, list[str]]:
        """The environment of a command, each variable with its possible values: the exported variables, and its own."""
        given: dict[str, list[str]] = {}
        for name in self.exported:
            values = self.values(name)
            if values:
                given[name] = values
        for name, value in own.items():
            given[name] = [self.expanded(value)]
        return given

    def environment(self) -> dict[str, list[str]]:
        """The possible values of each variable in the commands that set `a.b=value` or name a config; in all that set
        options if none does."""
        of_config = {name: seen for name, seen in self.flags.items() if name in ("config", "config_name")}
        if self.overrides or of_config:
            commands = _commands_of(self.overrides) | _commands_of(of_config)
        else:
            commands = _commands_of(self.flags)
        merged: dict[str, list[str]] = {}
        for command in sorted(commands or self.environments):  # of an array's options no command is known
            for name, values in self.environments[command].items():
                known = merged.setdefault(name, [])
                known += [value for value in values if value not in known]
        return merged

    def split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """The words, with each `$NAME` that contains options replaced by them; and the options that it contains only in
        some branches."""
        out: list[str] = []
        doubtful: dict[str, None] = {}
        for index, word in enumerate(words):
            reference = _REFERENCE.fullmatch(word)
            if reference is None:
                out.append(word)
                continue
            name = reference[1]
            if "=" in words[index - 1] or _REFERENCE.fullmatch(words[index - 1]):  # not a program, nor a flag's value
                self.spread[name] = None
            texts = [text.split() for text in self.values(name)]
            options = [option for text in texts for option in text]
            if not any(_OVERRIDE.fullmatch(option) or _FLAG.fullmatch(option) for option in options):
                out.append(word)
                continue
            sure = {option for option in options if all(option in text for text in texts)}
            out += [option for option in texts[0] if option in sure]
            doubtful |= {option: None for option in options if option not in sure}
        return out, list(doubtful)

    def values(self, name: str) -> list[str]:
        """The possible values of a variable; none if the script does not set it."""
        if name in self.branches:
            return self.branches[name]
        if name in self.variables:
            return [self.variables[name]]
        return []

    def missing(self) -> list[str]:
        """Variables among the options of a command that the script does not set."""
        set_here = {*self.variables, *self.branches, *self.arrays}
        return [name for name in self.spread if name not in set_here and not name.isdigit()]

    def assign(self, name: str, value: str) -> None:
        """Set a variable; after an assignment in a branch, it may have any of its values."""
        several = self.branches.get(name)
        if several:  # it extends the value from before the branch
            value = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", lambda _: several[0], value)
        value = self.expanded(value)
        if not self.depth:
            self.variables[name] = value
            self.branches.pop(name, None)
        elif self.variables.get(name) != value:
            before = self.values(name)
            self.variables.pop(name, None)
            self.branches[name] = list(dict.fromkeys([*before, value]))

    def options(self, words: list[str], command: int, start: int = 0, *, doubtful: bool = False) -> None:
        """Record the options among the words of an array, or of a command whose program is the word at `start`."""
        inside = doubtful or (self.depth > 0 and not command)
        by_hydra = any(_DOTTED.match(word) or _CONFIG_NAME.match(word) for word in words)  # it takes undotted ones too
        for index, word in enumerate(words):
            of_program = not command or index > start
            override = _OVERRIDE.fullmatch(word)
            deleted = _DELETED.fullmatch(word)
            if override and by_hydra and (of_program or _DOTTED.match(word)):
                self.overrides.setdefault(override[1], []).append((command, self.expanded(override[2]), inside))
            elif deleted and by_hydra:
                self.overrides.setdefault(deleted[1], []).append((command, "null", inside))
        for index, name, text in _flags(words):
            self.flags.setdefault(name, []).append((command, self.expanded(text), inside))
            if by_hydra and (index > start or not command):
                self.own[name] = None

    def settled(self, options: dict[str, Occurrences]) -> Flat:
        """Each option with its value, which is `Doubtful` if it depends on a branch or command."""
        flat: Flat = {}
        setting = _commands_of(options)
        for name, occurrences in options.items():
            if name in ("config_path", "config_dir"):  # a file is searched from the script's folder upwards
                occurrences = [(command, _HERE.sub(".", text), inside) for command, text, inside in occurrences]
            texts, always = self.possible(occurrences, setting)
            unset = re.findall(r"\$(?:\{?(\w+)|\()|`", texts[0])
            if len(texts) > 1 or not (always or unset):
                flat[name] = Doubtful(f"the script has {' or '.join(texts)}, by a branch or command")
            elif unset:
                why = [f"{v} is {' or '.join(self.branches[v])}" for v in unset if v in self.branches]
                doubt = f"the script has {texts[0]}"
                if why:
                    doubt += f": {', '.join(why)}"
                flat[name] = Doubtful(doubt)
            else:
                flat.update(_typed(name, texts[0]))
        return flat

    def possible(self, occurrences: Occurrences, setting: set[int]) -> tuple[list[str], bool]:
        """The possible texts of an option, and True if it is set in any case; `setting`: the commands with options."""
        texts, always = _of_arrays(occurrences)
        by_command = {command: text for command, text, inside in occurrences if command and not inside}
        if by_command:  # its words come after an array's
            programs = {self.commands[command] for command in by_command}
            silent = any(self.commands[command] in programs for command in setting - set(by_command))
            if silent:  # the same program also runs without it
                texts = [*by_command.values(), *texts]
            else:
                texts = list(by_command.values())
                always = True
        in_branches = [text for command, text, inside in occurrences if command and inside]
        return list(dict.fromkeys([*texts, *in_branches])), always

    def expanded(self, text: str) -> str:
        for _ in range(ROUNDS):
            before = text
            text = _ARITHMETIC.sub(self._arithmetic, _VARIABLE.sub(self._variable, text))
            if len(text) > LONGEST:  # a variable that doubles again and again: left unexpanded
                return before
            if text == before:
                break
        return text

    def _variable(self, match: re.Match[str]) -> str:
        name = match[1] or match[3]
        default = match[2]
        values = self.branches.get(name)
        if values:
            if len(values) == 1 and default is None:
                return values[0]
            return f"${{{name}}}"  # a default would hide them
        if default is None:
            return self.variables.get(name, match[0])
        return self.variables.get(name) or _unquoted(default)

    def _arithmetic(self, match: re.Match[str]) -> str:
        inside = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: self.variables.get(m[0], m[0]), match[1])
        number = _computed(inside)
        if number is None:
            return match[0]
        return f"{number:.0f}"


_CONFIG_NAME = re.compile(r"--config[-_]name(?:=|$)")


def _of_launcher(words: list[str], experiment: str | None) -> list[str]:
    """The command that UniRL's launch script runs, for one that calls it; any other command is returned unchanged."""
    script = next((i for i, word in enumerate(words[:2]) if _LAUNCHER.fullmatch(word)), None)
    if script is None:
        return words
    options = words[script + 1 :]
    if experiment is None and options:
        experiment = options.pop(0)
    if experiment is None:
        return words
    return ["python", "-m", "unirl.train_ar", f"--config-name={experiment}", *options]


def _program(words: list[str]) -> tuple[int, str, str]:
    """Where a command names its program (0 if nowhere), its module or file, and the module if it is one: `-m MODULE`
    or `FILE.py`; "" for what there is not."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index, word, ""
        if word == "-m":
            module = words[index + 1] if index + 1 < len(words) else word
            return index, module, module
    return 0, "", ""


def _commands_of(options: Mapping[str, Occurrences]) -> set[int]:
    """The commands that set any of the options."""
    commands = set()
    for occurrences in options.values():
        commands |= {command for command, _, _ in occurrences if command}
    return commands


def _of_arrays(occurrences: Occurrences) -> tuple[list[str], bool]:
    """The possible values from the arrays, and True if they give one in any case."""
    texts: list[str] = []
    always = False
    for command, text, inside in occurrences:
        if command:
            continue
        if inside:
            texts = list(dict.fromkeys([*texts, text]))
        else:
            texts = [text]
            always = True
    return texts, always


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _flags(words: list[str]) -> Iterator[tuple[int, str, str]]:
    """`--a-b 1 --c --d=x y` as (0, a_b, 1), (2, c, true), (3, d, x), with their places; several values as a list.
    `@ FILE` is the config of prime-rl's commands, `--a @ FILE` that of its section a."""
    for index, word in enumerate(words):
        if word == "@" and index + 1 < len(words):
            before = _FLAG.fullmatch(words[index - 1]) if index else None
            section = ""
            if before and before[2] is None:
                section = f"{before[1]}."
            yield index, f"{section}config", words[index + 1]
            continue
        flag = _FLAG.fullmatch(word)
        if not flag:
            continue
        name = flag[1].replace("-", "_")
        if flag[2] is not None:
            yield index, name, flag[2]
            continue
        values = []
        for value in words[index + 1 :]:
            if value.startswith("--") or value.endswith(".py") or value in ("|", "2>&1", "&", ">", "@"):
                break
            if _OVERRIDE.fullmatch(value):
                break
            values.append(value.rstrip(","))
        if words[index + 1 : index + 2] == ["@"]:
            continue
        if not values:
            yield index, name, "true"
        elif len(values) == 1:
            yield index, name, values[0]
        else:
            yield index, name, f"[{', '.join(values)}]"


def _typed(name: str, text: str) -> Flat:
    try:
        value = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError):
        value = text
    if isinstance(value, Mapping) and value:
        return dict(flattened(value, f"{name}."))
    return {name: value}


def flattened(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf."""
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        elif value == "???":  # in OmegaConf: it must be given elsewhere
            yield name, None
        else:
            yield name, value


_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


def _computed(text: str) -> float | None:
    try:
        number = literal(ast.parse(text.strip(), mode="eval").body, {})
    except (SyntaxError, ValueError):
        return None
    if isinstance(number, int | float):
        return float(number) // 1
    return None
