"""The environment that a recipe names, and the interface of its class and functions: tools, answers, a reward.

As in an episode, the user's code runs only in a worker process, so that an import that hangs doesn't hang the run.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from proxima.data import FieldError, require
from proxima.data.episode import ToolCall
from proxima.data.errors import abbreviated, suggestion
from proxima.data.json_reader import MAX_DEPTH_RECEIVED, load_json
from proxima.data.players import NAMES_OF_ROLES, are_roles
from proxima.environment import ENVIRONMENTS
from proxima.environment.call_readers import HOOKS
from proxima.environment.tool_calls import parameters_of
from proxima.process.worker import JobResult, KeptWorker, Worker
from proxima.system.user_modules import import_user_module

HOST_PROCESS = "proxima.environment.host_process"
SIGNATURE = "give every parameter a type, and the docstring a line on it under 'Args:'"


def require_environment(kind: str) -> None:
    """Raise FieldError unless a kind is known, or is `module:Class`; the remedy names the package that has more."""
    remedy = "; ".join(filter(None, [suggestion(kind, ENVIRONMENTS, "module:Class"), ENVIRONMENTS.elsewhere]))
    require(":" in kind or kind in ENVIRONMENTS, "environment", kind, "is unknown", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """An environment as specified in a recipe.

    Args:
        kind: a name in `ENVIRONMENTS`, or `module:Class`; None: only tools.
        arguments: arguments of the class, by name.
        tools: plain functions, `module:function`, as tools in addition to those of the class.
    """

    kind: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is not None and ":" not in self.kind:
            require_environment(self.kind)

    def inspected(self, start: Callable[[], Worker], seconds: float) -> "EnvironmentInterface":
        """Import and create the environment in a worker process and return its interface. Retry twice if the worker or
        the server that forks it died.

        Raises: FieldError: it can't be imported or created, a tool is invalid, or it has neither tools nor `respond`.
        """
        kept = KeptWorker(start)
        deadline = monotonic() + seconds
        left = seconds
        for _ in range(3):
            try:
                result = kept.run("inspect", vars(self), left)
            except RuntimeError as error:
                result = JobResult(error=str(error))
            left = deadline - monotonic()
            if result.value is not None or left <= 0:
                break
        kept.replace()
        if result.value is None:
            bound = f"can't be loaded: {result.error}"
            if self.kind:
                raise FieldError("environment", self.kind, bound)
            raise FieldError("tools", list(self.tools), bound)
        if "problem" in result.value:
            name, value, bound, remedy = result.value["problem"]
            raise FieldError(name, value, bound, remedy=remedy)
        return EnvironmentInterface.of(result.value)


@dataclass(frozen=True, kw_only=True)
class EnvironmentInterface:
    """The interface of an environment.

    Args:
        schemas: schemas of the tools, as chat templates take them (`transformers.utils.get_json_schema`).
        responds: it answers messages that call no tool.
        reward: the member read at the end; empty: none, though turns may have rewards (`Reply.reward`).
        columns: the columns that `reset` requires.
        by_row: more tools are known once an episode is open, see `with_row`.
        reads_messages: `get_reward` receives what was said.
        roles: who plays it; none: the policy alone, in one chat.
        plays: it plays by itself, see `agent_kinds.AgentKind`.
        settled: arguments of a built-in class, by name, that the inspection has determined for all workers.
        notes: lines for the user at the start of a run.
    """

    schemas: tuple[Mapping[str, Any], ...] = ()
    responds: bool = False
    reward: Literal["get_reward", "reward", ""] = ""
    columns: tuple[str, ...] = ()
    by_row: bool = False
    reads_messages: bool = False
    roles: tuple[str, ...] = ()
    plays: bool = False
    settled: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> "EnvironmentInterface":
        """The interface that `read_interface` has read."""
        tuples = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
        return cls(**{**read, **tuples})

    def with_row(self, opened: Mapping[str, Any]) -> "EnvironmentInterface":
        """The interface of an episode, from the answer to `open_environment`: with the tools of its row."""
        if opened.get("tools"):
            return replace(self, schemas=(*self.schemas, *opened["tools"]))
        return self

    @cached_property
    def tools(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool's parameters, by the tool's name."""
        return parameters_of(self.schemas)

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise FieldError if `reset` needs a column that rows don't have."""
        for name in self.columns:
            has = ", ".join(sorted(columns)) or "none"
            bound = f"has a reset() with the parameter {name!r}, which is not a column"
            require(name in columns, "environment", name, bound, remedy=f"give it a default, or use a column: {has}")

    def arguments_of(self, call: ToolCall) -> dict[str, Any]:
        """Convert the arguments of a call to the tool's types. ValueError, with a message for the model, if that is
        impossible. A text is accepted for a number, a list or an object if it is the JSON of one, because in XML all
        arguments are texts."""
        if call.name not in self.tools:
            raise ValueError(f"there is no tool {call.name[:60]!r}, only {', '.join(self.tools) or 'none'}")
        properties = self.tools[call.name].get("properties", {})
        arguments = call.arguments
        for name in arguments:
            if name not in properties:
                raise ValueError(f"{call.name} has no argument {name[:60]!r}, only {', '.join(properties) or 'none'}")
        for name in self.tools[call.name].get("required", ()):
            if name not in arguments:
                raise ValueError(f"{call.name} needs the argument {name!r}")
        return {name: _typed(name, value, properties[name]) for name, value in arguments.items()}


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def _typed(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Convert a value to the type in its schema; ValueError if that is impossible."""
    if value is None and schema.get("nullable"):
        return None
    for choice in schema.get("anyOf", ()):
        try:
            return _typed(name, value, choice)
        except ValueError:
            continue
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else list(named or ())
    if kinds and not _is(value, kinds):
        value = _converted(value, kinds)
    other_type = bool(kinds) and not _is(value, kinds)
    other_value = "enum" in schema and value not in schema["enum"]
    if "anyOf" in schema or other_type or other_value:
        words = " or ".join(kinds)
        if "enum" in schema:
            words = f"one of {', '.join(map(str, schema['enum']))}"
        shown = abbreviated(json.dumps(value, ensure_ascii=False), 60)
        raise ValueError(f"{name} must be {words or 'another'}, not {shown}")
    if isinstance(value, list) and "items" in schema:
        return [_typed(name, item, schema["items"]) for item in value]
    return value


def _is(value: Any, kinds: Sequence[str]) -> bool:
    return any(
        isinstance(value, TYPES.get(kind, object)) and (type(value) is not bool or kind == "boolean") for kind in kinds
    )


def _converted(value: Any, kinds: Sequence[str]) -> Any:
    """Convert a value to one of the kinds if possible, otherwise return it unchanged: "5" or 5.0 to 5, 5 to "5"."""
    if "string" in kinds and type(value) in (int, float):
        return str(value)
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in ("True", "False", "None"):
        text = text.lower()
    try:
        read = load_json(text, depth=MAX_DEPTH_RECEIVED, **HOOKS)
    except ValueError:
        return value
    if _is(read, kinds):
        return read
    if isinstance(read, float):
        return _converted(read, kinds)
    return value


# Everything below runs in a worker.


def load_class(kind: str) -> Callable[..., Any]:
    """Load the class, or another callable that creates an environment; FieldError if it is missing."""
    return _loaded("environment", kind, ENVIRONMENTS.references.get(kind, kind))


def load_tools(tools: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Load the functions, by name; FieldError if one is missing or two have the same name."""
    functions: dict[str, Callable[..., Any]] = {}
    for path in tools:
        function = _loaded("tools", path, path)
        name = function.__name__
        if name in functions:
            raise FieldError("tools", path, f"is a second tool named {name!r}", remedy="rename or remove one of them")
        functions[name] = function
    return functions


def _loaded(where: str, value: str, reference: str) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    form = "module:function" if where == "tools" else "module:Class"
    if not name or "/" in module_name or module_name.endswith(".py"):
        example = f"{Path(module_name).stem or 'my_tools'}:{name or form.partition(':')[2]}"
        raise FieldError(where, value, f"must be {form}", remedy=f"as {example}, from this folder or PYTHONPATH")
    try:
        module = import_user_module(module_name)
        made: Callable[..., Any] | None = member(module, name)
    except ModuleNotFoundError as error:
        bound = f"can't be imported: there is no module {error.name!r}"
        raise FieldError(where, value, bound, remedy="put its folder on PYTHONPATH, or install it") from error
    except Exception as error:
        raise FieldError(where, value, f"can't be imported: {_line(error)}", remedy=_remedy(error)) from error
    if not callable(made):
        names = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise FieldError(where, value, f"has no {name!r}", remedy=suggestion(name, names))
    return made


def _remedy(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "raise episode.memory_mb"
    if isinstance(error, OSError):
        return "is the network or the server there that it needs?"
    return ""


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def make_environment(kind: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Create an environment; FieldError if the class doesn't take the arguments, or raises."""
    try:
        signature = inspect.signature(make)
        signature.bind(**arguments)
    except ValueError:  # some classes written in C have no signature
        pass
    except TypeError as error:
        raise FieldError("environment", kind, f"can't be made: {error}", remedy=f"it takes {signature}") from None
    with _as_field_error(kind, "be made"):
        made = make(**arguments)
    return made


@contextmanager
def _as_field_error(kind: str, what: str) -> Iterator[None]:
    """Convert exceptions of the user's class to FieldError."""
    try:
        yield
    except FieldError as error:
        error.field = f"environment.{error.field}"
        raise
    except Exception as error:
        raise FieldError("environment", kind, f"can't {what}: {_line(error)}", remedy=_remedy(error)) from error


NO_TOOLS = frozenset({"reset", "respond", "get_reward", "reward", "auto_outcome"})
OF_THE_RUN = frozenset({"close", "check", "inputs", "rows"})  # what a run asks a kind of `concurrent_hosts`
BRINGS = frozenset({"tools", "call_tool"})  # a class with both has tools that are only known once it is instantiated


def member(owner: Any, name: str) -> Any:
    """An attribute of a user's object, class or module; None if it is missing."""
    return getattr(owner, name, None)


def brings_tools(environment: Any) -> bool:
    """Return True if it has `tools()`, which returns schemas, and `call_tool(name, arguments)`."""
    return all(inspect.isfunction(member(type(environment), name)) for name in BRINGS)


def has_tools_by_row(environment: Any) -> bool:
    """Return True if `tools()` is asked after `reset`."""
    return brings_tools(environment) and member(type(environment), "tools_by_row") is True


def methods_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods that are tools, by name. Names are read from the class, because reading them from an object
    would run properties."""
    names = {name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)} - NO_TOOLS
    if brings_tools(environment):
        names -= BRINGS
    if member(type(environment), "concurrent") is True:
        names -= OF_THE_RUN
    return {name: getattr(environment, name) for name in sorted(names) if not name.startswith("_")}


def tool_of(environment: Any, name: str) -> Callable[..., Any]:
    """Return the function that runs a tool."""
    if brings_tools(environment) and name not in methods_of(environment):
        return lambda **arguments: environment.call_tool(name, arguments)
    tool: Callable[..., Any] = getattr(environment, name)
    return tool


def read_interface(*, kind: str | None, arguments: Mapping[str, Any], tools: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an `EnvironmentInterface`, as JSON; FieldError if the environment is invalid."""
    functions = load_tools(tools)
    schemas = [_schema("tools", path, function) for path, function in zip(tools, functions.values(), strict=True)]
    if kind is None:
        require(bool(schemas), "tools", list(tools), "names no tool", remedy="name a function, or remove the field")
        return {"schemas": schemas, "responds": False, "reward": "", "columns": []}
    cls = load_class(kind)
    if member(cls, "plays") is True:
        return {"plays": True}
    environment = make_environment(kind, cls, arguments)
    for name, method in methods_of(environment).items():
        bound = f"has a method {name!r}, and tools has a function of this name"
        require(name not in functions, "environment", kind, bound, remedy="rename one of them")
        schemas.append(_schema("environment", kind, method))
    by_row = has_tools_by_row(environment)
    if not by_row:
        schemas += brought_schemas(kind, environment, {*functions, *methods_of(environment)})
    responds = callable(member(environment, "respond"))
    bound = "has neither a tool nor a method `respond`"
    remedy = "a tool is a public method with types and a docstring"
    require(responds or by_row or bool(schemas), "environment", kind, bound, remedy=remedy)
    reward = ""
    get_reward = member(environment, "get_reward")
    if callable(get_reward):
        reward = "get_reward"
    elif hasattr(environment, "reward"):
        reward = "reward"
    read = {
        "schemas": schemas,
        "responds": responds,
        "reward": reward,
        "columns": _columns(environment),
        "by_row": by_row,
        "reads_messages": callable(get_reward) and "messages" in inspect.signature(get_reward).parameters,
    }
    roles = _roles(kind, environment)
    if roles:
        bound = "has roles, and no method `respond`, which says who is next"
        require(responds, "environment", kind, bound)
        bound = "has roles, and a get_reward that reads messages, of which each role has its own"
        require(not read["reads_messages"], "environment", kind, bound)
        read["roles"] = roles
    if kind in ENVIRONMENTS:  # a user's class may have attributes of these names
        read |= {"settled": member(environment, "settled") or {}, "notes": member(environment, "notes") or []}
    return read


def class_roles(environment: Any) -> Sequence[str]:
    """The roles of an environment's class; most have none."""
    roles = member(type(environment), "roles")
    return roles if isinstance(roles, list | tuple) else ()  # a user's class may have another member of this name


def _roles(kind: str, environment: Any) -> list[str]:
    """The roles of a class; FieldError if their names can't be those of roles."""
    roles = class_roles(environment)
    require(are_roles(roles), "environment", kind, f"has the roles {list(roles)!r:.80}, which {NAMES_OF_ROLES}")
    return list(roles)


def _columns(environment: Any) -> list[str]:
    if not hasattr(environment, "reset"):
        return []
    parameters = inspect.signature(environment.reset).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty]
    return [p.name for p in named if p.name not in ("row", "seed", "prompt")]


def brought_schemas(kind: str, environment: Any, taken: Collection[str]) -> list[dict[str, Any]]:
    """The schemas that `tools()` of an environment returns; FieldError if one is invalid or its name is taken."""
    if not brings_tools(environment):
        return []
    with _as_field_error(kind, "list its tools"):
        schemas = [json.loads(json.dumps(schema)) for schema in environment.tools()]
    names = set(taken)
    for schema in schemas:
        function = None
        if isinstance(schema, dict):
            function = schema.get("function")
        complete = isinstance(function, dict) and {"name", "description", "parameters"} <= function.keys()
        require(complete, "environment", kind, f"lists the tool {json.dumps(schema):.80}, which is not a schema")
        problem = tool_problem({"type": "function"} | schema, json.dumps(schema["function"]["name"])[:60])
        require(not problem, "environment", kind, f"lists a tool that is not a schema: {problem}")
        name = schema["function"]["name"]
        require(name not in names, "environment", kind, f"has two tools {name!r}", remedy="rename one of them")
        names.add(name)
    return schemas


def _schema(where: str, value: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool. Avoids torch, which transformers would import to compare types with `Tensor`."""
    from transformers.utils import chat_template_utils

    chat_template_utils.is_torch_available = lambda: False  # type: ignore[attr-defined]  # it imports that
    name = function.__name__
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            reason = f"has the tool {name!r} with the parameter {p}"
            raise FieldError(where, value, reason, remedy="name its parameters")
    try:
        schema: dict[str, Any] = chat_template_utils.get_json_schema(function)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip("!.")
        raise FieldError(where, value, f"has the tool {name!r} without a schema: {reason}", remedy=SIGNATURE) from None
    return schema


def tool_problem(tool: Any, where: str) -> str:
    """Describe the problem with a tool, `{"type": "function", "function": {"name": …, "parameters": …}}`, at a field
    below `where`; empty if it is valid, so that chat templates and readers of calls need no further checks."""
    function = None
    if isinstance(tool, dict) and tool.get("type") == "function":
        function = tool.get("function")
    if not isinstance(function, dict):
        return f'{where}: must be {{"type": "function", "function": {{"name": …, "parameters": …}}}}'
    place = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return f"{place}.name: must be a text that is not empty"
    if not isinstance(function.get("description"), str | None):
        return f"{place}.description: must be a text"
    parameters = function.get("parameters")
    if parameters is None:
        return ""
    if not isinstance(parameters, dict):
        return f"{place}.parameters: must be an object, a JSON schema"
    if parameters.get("type", "object") != "object":
        return f"{place}.parameters.type: must be 'object'"
    return _schema_problem(parameters, f"{place}.parameters")


def _schema_problem(schema: Any, where: str) -> str:
    """Describe the problem with the schema of a value, in the parts that a template or a reader of calls uses; empty if
    there is none. True and false are schemas, too."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"{where:.150}: must be an object, a JSON schema"
    kind = schema.get("type", "object")
    expected: Mapping[str, bool] = {
        "properties: must be an object": isinstance(schema.get("properties", {}), dict),
        "required: must be a list of texts": _is_texts(schema.get("required", [])),
        "type: must be a text, or a list of texts": isinstance(kind, str) or _is_texts(kind),
        "description: must be a text": isinstance(schema.get("description"), str | None),
        "enum: must be a list": isinstance(schema.get("enum", []), list),
        "anyOf: must be a list": isinstance(schema.get("anyOf", []), list),
    }
    for requirement, met in expected.items():
        if not met:
            return f"{where:.150}.{requirement}"
    inner = {f"properties.{name}": value for name, value in schema.get("properties", {}).items()}
    inner |= {f"anyOf.{i}": value for i, value in enumerate(schema.get("anyOf", []))}
    items = schema.get("items", True)
    if isinstance(items, list):
        of_items = {f"items.{i}": value for i, value in enumerate(items)}
    else:
        of_items = {"items": items}
    inner |= of_items
    return next(filter(None, (_schema_problem(value, f"{where}.{name}") for name, value in inner.items())), "")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
