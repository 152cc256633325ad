"""Agents as a recipe names them, that is, environments that play by themselves; and the sandboxes of their programs.

These are frozen dataclasses, with what other rooms ask of them. What plays the episodes is in `agents`.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from proxima.data import FieldError, require, within
from proxima.data.kinds import Kinds, Slot
from proxima.data.players import NAMES_OF_ROLES, are_roles
from proxima.environment import ENVIRONMENTS
from proxima.environment.agents import SCRIPT, Agents, CommandAgents, LocalRunner, ProcessAgents, Runner
from proxima.environment.interface import make_environment
from proxima.system.foreign_folder import file_sha256, opened_file
from proxima.system.machine import SERVER_REMEDY, missing_for_server
from proxima.system.user_modules import user_class, user_module_file

AGENT_SANDBOXES = Kinds({"none": "proxima.environment.agent_kinds:NoSandbox"}, "proxima.agent_sandboxes")
PROGRAMS = 16  # at once, where the recipe says nothing


class AgentKind:
    """Base of the kinds of environments that play episodes by themselves, against the run's endpoint: frozen
    dataclasses, whose fields are those of a recipe.

    A kind with rows of its own also has `rows(split, skip, size)`, which returns a sequence of mappings: `messages`,
    `answer`, and columns that the episode gets, too.
    """

    plays: ClassVar[bool] = True
    trains_only: ClassVar[bool] = False  # it can't play the questions of an evaluation
    needs: ClassVar[Mapping[str, str]] = {}  # packages, as they are imported → what installs them
    roles: Sequence[str]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The fields of a recipe's arguments, and the names of those that the recipe calls otherwise."""
        return dict(given), {}

    def build(self) -> Agents:
        """Build the agents; FieldError: they can't be used."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise FieldError if it can't play on this machine; `explain` and a run's start ask before weights load."""

    def inputs(self) -> Mapping[str, str]:
        """What a resume compares: digests, ids or versions of what it plays with, by names for messages."""
        return {}

    def auto_outcomes(self) -> Mapping[str, tuple[str, str]]:
        """What its fields that are `auto` become here, and why, by their names; see `proxima.config.outcomes`."""
        return {}


def agent_class(kind: object) -> type | None:
    """The class of a kind that plays by itself; None of another kind, and of `module:Class` until its world is built:
    only a worker imports it before."""
    if not isinstance(kind, str):
        return None
    if kind in ENVIRONMENTS:
        cls: Any = ENVIRONMENTS[kind]
    else:
        module, _, name = kind.partition(":")
        cls = getattr(sys.modules.get(module), name or "-", None)
    return cls if getattr(cls, "plays", False) is True else None


def is_concurrent(kind: object) -> bool:
    """True of a kind by name whose environments are played in the run's own process, see `concurrent_hosts`."""
    return isinstance(kind, str) and kind in ENVIRONMENTS and getattr(ENVIRONMENTS[kind], "concurrent", False) is True


def asked_kind(kind: object, given: Mapping[str, Any]) -> Any:
    """What the rooms of a run ask of a kind, by `check`, `inputs` and `rows`: an agent, or an environment that
    `is_concurrent`; None of any other.

    Raises:
        FieldError: an argument is wrong, by the recipe's name.
    """
    cls = agent_class(kind)
    if cls is not None:
        return make_agent(cls, given, str(kind))
    if not is_concurrent(kind):
        return None
    try:
        return make_environment(str(kind), ENVIRONMENTS[str(kind)], given)
    except FieldError as error:
        if error.field == "environment":
            error.field = "kind"
        else:
            error.field = error.field.removeprefix("environment.")
        raise


def make_agent(cls: type, given: Mapping[str, Any], kind: str) -> Any:
    """Make a kind that plays by itself from a recipe's arguments; FieldError, by the recipe's names, if one is
    wrong."""
    arguments, _ = cls.read(given)  # type: ignore[attr-defined]  # as `agent_class` returns it, an AgentKind or alike
    names = [field.name for field in fields(cls)]
    for name, value in arguments.items():
        remedy = f"it has {', '.join(names)}"
        require(name in names, name, value, f"is not a field of the environment {kind!r}", remedy=remedy)
    with as_in_recipe(cls, given):
        return cls(**arguments)


@contextmanager
def as_in_recipe(cls: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Name the fields of errors as the recipe does, see `AgentKind.read`."""
    try:
        yield
    except FieldError as error:
        first, _, below = error.field.partition(".")
        _, renamed = cls.read(given)
        error.field = f"{renamed.get(first, first)}.{below}".removesuffix(".")
        raise


@dataclass(frozen=True, kw_only=True)
class AgentSandbox:
    """Base of the kinds of sandboxes in which the program of an agent runs: frozen dataclasses, whose fields are those
    of a recipe."""

    shows_files: ClassVar[bool] = False  # `AgentSpec.readable` has an effect
    text_field: ClassVar[str] = ""  # the field that a recipe may give alone, in place of a mapping

    def runner(self, spec: "AgentSpec") -> Runner:
        """What starts the programs; FieldError: none can be started."""
        raise NotImplementedError

    def agents(self, spec: "AgentSpec") -> Agents:
        """The agents that play in it; FieldError: it can't be used."""
        return CommandAgents(self.runner(spec), spec.workers or PROGRAMS)

    def inputs(self) -> Mapping[str, str]:
        """See `AgentKind.inputs`."""
        return {}

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return None


@dataclass(frozen=True, kw_only=True)
class NoSandbox(AgentSandbox):
    """Beside the run, with its rights."""

    def runner(self, spec: "AgentSpec") -> Runner:
        return LocalRunner(spec.command)


def sandbox_of(given: AgentSandbox | str | Mapping[str, Any]) -> AgentSandbox:
    """The sandbox that a recipe names: a kind, or a mapping with its kind and its fields; FieldError if it is wrong."""
    if not isinstance(given, str | Mapping):
        return given  # one that is made
    values: dict[str, Any] = {"kind": given} if isinstance(given, str) else dict(given)
    kind = values.pop("kind", None)
    known = isinstance(kind, str) and (kind in AGENT_SANDBOXES or ":" in kind)
    remedy = AGENT_SANDBOXES.elsewhere
    require(known, "sandbox", kind, f"must be {', '.join(AGENT_SANDBOXES)}, or module:Class", remedy=remedy)
    cls: Any = AGENT_SANDBOXES[kind] if kind in AGENT_SANDBOXES else user_class(str(kind))
    names = [field.name for field in fields(cls)]
    with within("sandbox"):
        for name, value in values.items():
            require(name in names, name, value, "is not a field", remedy=f"it has {', '.join(names) or 'none'}")
        for field in fields(cls):
            given_or_default = field.name in values or field.default is not MISSING
            require(given_or_default, field.name, None, f"must be given for the sandbox {kind!r}")
        made: AgentSandbox = cls(**values)
    return made


@dataclass(frozen=True, kw_only=True)
class AgentSpec(AgentKind):
    """An agent as specified in a recipe: `run` or `command`, not both.

    Args:
        run: `module:function`. The function receives those of `row`, `base_url`, `api_key` and `model` that are among
            its parameters, may be `async`, and returns a reward, a mapping from roles to rewards, or None.
        command: a program and its arguments. `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` are set, and the
            same of `ANTHROPIC`; the row is passed as JSON on standard input. The last line of output may be the
            reward, a number, or a JSON object with the reward of each role; its last 64 KiB are kept.
        workers: number of processes that run the function, or of programs that run at once. 0: a process for each 16
            episodes at once, at most as many as cores; 16 programs.
        sandbox: where each program runs: `none`, beside the run, with its rights; another kind, or its fields with
            their `kind`. A field with the name of a sandbox may say the same, as `jail: {level: 3}`.
        readable: files and folders that are visible in the sandbox besides the system's and those of the command.
        roles: names of the roles that the policy plays; the agent requests `policy/<role>` as its model, or
            `policy/<role>/<number>` for one of several attempts. Empty: no roles, and a model's name is ignored.
    """

    run: str = ""
    command: tuple[str, ...] = ()
    workers: int = 0
    sandbox: Annotated[Any, Slot("proxima.environment.agent_kinds:AGENT_SANDBOXES")] = "none"
    readable: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        arguments = dict(given)
        own = {field.name for field in fields(cls)}
        renamed: dict[str, str] = {}
        for name, value in given.items():
            if name in own or name not in AGENT_SANDBOXES or not value:
                continue
            chosen = arguments.get("sandbox", "none")
            clash = f"can't be given together with `{name}`"
            require(chosen in ("none", name), "sandbox", chosen, clash)
            settings = arguments.pop(name)
            if not isinstance(settings, Mapping):
                chosen_class: type[AgentSandbox] = AGENT_SANDBOXES[name]
                settings = {chosen_class.text_field: settings}
            arguments["sandbox"] = {"kind": name, **settings}
            renamed.setdefault("sandbox", name)
        return arguments, renamed

    def __post_init__(self) -> None:
        require(are_roles(self.roles), "roles", self.roles, NAMES_OF_ROLES)
        box = sandbox_of(self.sandbox)
        object.__setattr__(self, "sandbox", box)
        exactly_one = bool(self.run) != bool(self.command)
        require(exactly_one, "run", self.run or None, "must be given, or `command`, and not both")
        require(not self.run or ":" in self.run, "run", self.run, "must be module:function")
        require(self.workers >= 0, "workers", self.workers, "must be >= 0", remedy="0: by cores, or 16 programs")
        boxed = not isinstance(box, NoSandbox)
        require(not (boxed and self.run), "sandbox", AGENT_SANDBOXES.kind_of(box), "needs `command` in place of `run`")
        for path in self.readable:
            require(os.path.exists(path), "readable", path, "does not exist")
        shown = not self.readable or box.shows_files
        require(shown, "readable", self.readable, "has no effect without `sandbox: bubblewrap`")
        missing = missing_for_server()
        field = "run" if self.run else "command"
        bound = f"is served by {missing}, not installed here"
        require(not missing, field, self.run or self.command, bound, remedy=SERVER_REMEDY)
        if self.run:
            name = self.run.partition(":")[0]
            importable = user_module_file(name) is not None  # not imported: only the worker needs its packages
            remedy = "run in its folder, or install it"
            require(importable, "run", self.run, f"names the module {name}, which can't be found", remedy=remedy)

    def build(self) -> Agents:
        if self.run:
            return ProcessAgents((sys.executable, str(SCRIPT), self.run), self.workers)
        agents: Agents = self.sandbox.agents(self)
        return agents

    def inputs(self) -> Mapping[str, str]:
        """The scripts of its command, the file of its function, and what its sandbox is made of."""
        files = [Path(word) for word in self.command if _is_script(word)]
        if self.run:
            file = user_module_file(self.run.partition(":")[0])
            if file is not None:
                files.append(file)
        return {file.name: file_sha256(file) for file in files} | dict(self.sandbox.inputs())

    def auto_outcomes(self) -> Mapping[str, tuple[str, str]]:
        names = [field.name for field in fields(self.sandbox) if getattr(self.sandbox, field.name) == "auto"]
        known = {f"sandbox.{name}": self.sandbox.auto_outcome(name) for name in names}
        return {name: outcome for name, outcome in known.items() if outcome is not None}


def _is_script(word: str) -> bool:
    """True if a word of a command names a text file; the binary of its interpreter is not one."""
    if not os.path.isfile(word):  # a long one is no name of a file
        return False
    with opened_file(Path(word)) as file:
        return b"\0" not in os.read(file, 1024)
