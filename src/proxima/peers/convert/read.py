"""Read a peer's options by dotted name from YAML, JSON, a launch script or a Python call; nothing is executed."""

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from proxima.config.problems import one_problem
from proxima.config.scalars import Loader
from proxima.data import UserError

Flat = dict[str, Any]


def read(path: Path) -> Flat:
    """The options of a file: dotted name → scalar or list, with `${…}` replaced by values of the same file.

    Raises:
        ConfigError: the file can't be read, or sets no options.
    """
    text = _text(path)
    if path.suffix == ".py":
        return from_python(text, str(path))
    if path.suffix in (".sh", ".bash"):
        return interpolated(from_script(text, str(path)))
    try:
        raw = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=Loader)  # a safe one
        flat = dict(_flatten(raw)) if isinstance(raw, Mapping) else {}
    except json.JSONDecodeError as error:
        raise one_problem(str(path), f"not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise one_problem(str(path), f"not YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, TypeError):
        raise one_problem(str(path), "an anchor contains itself, or a key is no plain word; write it out") from None
    if not isinstance(raw, Mapping) or not flat:
        wanted = "give the framework's own config file, a mapping of option names to values"
        raise one_problem(str(path), f"holds no options; {wanted}")
    return interpolated(flat)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise one_problem(str(path), f"can't be read ({error.strerror}); give a YAML, JSON, .sh or .py file") from None
    except UnicodeDecodeError:
        raise one_problem(str(path), "is not UTF-8 text; give a YAML, JSON, .sh or .py file") from None


def _flatten(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif value != "???":  # OmegaConf's mark of a value that must be given elsewhere
            yield name, value


# --- ${…}, as OmegaConf reads it --------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")  # the innermost one
_ROUNDS = 10  # how deep references may nest; ends a circle


def interpolated(flat: Flat) -> Flat:
    """Replace `${a.b}`, `${.sibling}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` by values of this file.

    The environment is not read. A reference that the file does not resolve stays as written.
    """
    known = dict(flat)
    for _ in range(_ROUNDS):
        pending = [name for name, value in known.items() if isinstance(value, str) and "${" in value]
        changed = False
        for name in pending:
            value = _replaced(known[name], name, known)
            changed |= value != known[name]
            known[name] = value
        if not changed:
            break
    return known


def _replaced(text: str, name: str, known: Flat) -> Any:
    if single := _REFERENCE.fullmatch(text):
        found = _meaning(single[1], name, known)
        return text if found is _UNKNOWN else found

    def one(match: re.Match[str]) -> str:
        found = _meaning(match[1], name, known)
        return match[0] if found is _UNKNOWN else "null" if found is None else str(found)

    return _REFERENCE.sub(one, text)


_UNKNOWN = object()


def _meaning(inside: str, name: str, known: Flat) -> Any:
    resolver, colon, rest = inside.partition(":")
    if not colon:
        return known.get(_absolute(inside, name), _UNKNOWN)
    target, comma, default = rest.partition(",")
    if resolver == "oc.select" and (found := known.get(_absolute(target, name))) is not None:
        return found
    if resolver in ("oc.select", "oc.env") and comma:
        return yaml.load(default, Loader=Loader)
    return None if resolver == "oc.select" else _UNKNOWN


def _absolute(target: str, name: str) -> str:
    target = target.strip()
    dots = len(target) - len(target.lstrip("."))
    return ".".join([*name.split(".")[:-dots], target[dots:]]) if dots else target


# --- launch scripts ---------------------------------------------------------------------------------------------------

_ASSIGNMENT = re.compile(
    r"""\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(\$\(\(.*\)\)|\$\{\w+:?-"[^"]*"\}|"[^"]*"|'[^']*'|[^\s("']*)\s*;?\s*(?:\#.*)?"""
)  # a name and one value: an arithmetic, a quoted or a bare one
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/]*(?:\.[\w@/]+)+)=(.*)", re.DOTALL)


def from_script(text: str, name: str = "script") -> Flat:
    """The `a.b=value` words of a shell script; expands its variables: `$n`, `${n}`, `${n:-default}`, `$((1024 * 20))`.

    Raises:
        ConfigError: the script has no such word.
    """
    variables: dict[str, str] = {}
    flat: Flat = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if assignment := _ASSIGNMENT.fullmatch(line):
            variables[assignment[1]] = _expanded(assignment[2].strip("\"'"), variables)
            continue
        for word in _words(line):
            if found := _OVERRIDE.fullmatch(word):
                flat.update(_override(found[1], _expanded(found[2], variables)))
    if not flat:
        wanted = "give the config file, or the script that sets the options"
        raise one_problem(name, f"has no words like algorithm.adv_estimator=grpo; {wanted}")
    return flat


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote over several lines: not a line of options
        return []


def _override(name: str, text: str) -> Flat:
    try:
        value = yaml.load(text, Loader=Loader) if "$" not in text else text
    except yaml.YAMLError:
        value = text
    return dict(_flatten(value, f"{name}.")) if isinstance(value, Mapping) else {name: value}


_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    def arithmetic(match: re.Match[str]) -> str:
        inside = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: variables.get(m[0], m[0]), match[1])
        found = _computed(inside)
        return match[0] if found is None else f"{found:.0f}"

    for _ in range(_ROUNDS):
        before = text
        text = _ARITHMETIC.sub(arithmetic, _VARIABLE.sub(variable, text))
        if text == before:
            break
    return text


def _computed(text: str) -> float | None:
    try:
        found = literal(ast.parse(text.strip(), mode="eval").body, {})
    except (SyntaxError, ValueError):
        return None
    return float(found) // 1 if isinstance(found, int | float) else None


# --- Python -----------------------------------------------------------------------------------------------------------

UNREADABLE = "…"  # stands for an expression whose value only a run would know


def from_python(text: str, name: str = "file", call: str = "GRPOConfig", trainer: str = "GRPOTrainer") -> Flat:
    """The keywords of the only `GRPOConfig(…)` call in a Python file, with `model` and `reward_funcs` of the trainer's.

    Reads literals, arithmetic on them and names assigned once at module level; anything else is `UNREADABLE`.
    Raises:
        ConfigError: no such call, several, or not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise one_problem(name, f"not Python: {error}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == call]
    if not calls:
        raise one_problem(name, f"has no {call}(…) call; give the file that makes one, or the options as YAML")
    if len(calls) > 1:
        lines = ", ".join(str(node.lineno) for node in calls)
        raise one_problem(name, f"has {len(calls)} {call}(…) calls, in lines {lines}; keep one")
    constants = _constants(tree)
    flat: Flat = {}
    for keyword in calls[0].keywords:
        if keyword.arg is None:
            flat[f"**{ast.unparse(keyword.value)}"] = UNREADABLE
        else:
            flat[keyword.arg] = _value(keyword.value, constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == trainer:
            for keyword in node.keywords:
                found = _value(keyword.value, constants)
                if keyword.arg == "model" and found is not UNREADABLE:
                    flat["model_name_or_path"] = found
                elif keyword.arg == "reward_funcs":
                    flat["reward_funcs"] = _functions(tree, keyword.value, constants)
    return flat


def _functions(tree: ast.Module, node: ast.expr, constants: Mapping[str, Any]) -> list[str]:
    """The functions of a list or of a variable for one, as text, with their packages and with constants in calls."""
    nodes = list(ast.walk(tree))
    if isinstance(node, ast.Name):
        assigned = [
            item for item in nodes if isinstance(item, ast.Assign) and node.id in {t.id for t in _targets(item)}
        ]
        node = assigned[0].value if len(assigned) == 1 else node
    homes = {item.name: "__main__" for item in nodes if isinstance(item, ast.FunctionDef | ast.ClassDef)}
    for item in nodes:
        if isinstance(item, ast.ImportFrom):
            homes |= {alias.name: item.module or "" for alias in item.names if alias.asname in (None, alias.name)}
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [_named(item, homes, constants) for item in items]


def _named(node: ast.expr, homes: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    def text(value: ast.expr) -> str:
        known = _value(value, constants)
        return ast.unparse(value) if known is UNREADABLE else repr(known)

    if isinstance(node, ast.Call):
        given = [text(value) for value in node.args]
        given += [f"{key.arg}={text(key.value)}" if key.arg else f"**{text(key.value)}" for key in node.keywords]
        return f"{_named(node.func, homes, {})}({', '.join(given)})"
    name = ast.unparse(node)
    home = homes.get(name.partition(".")[0])
    return f"{home}.{name}" if home else name


def _called(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names assigned exactly once, at module level, to a readable value."""
    found: dict[str, Any] = {}
    assigned = [target.id for node in ast.walk(tree) for target in _targets(node)]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in _targets(node):
                if assigned.count(target.id) == 1 and (value := _value(node.value, found)) is not UNREADABLE:
                    found[target.id] = value
    return found


def _targets(node: ast.AST) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    return [target for target in targets if isinstance(target, ast.Name)]


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    try:
        return literal(node, constants)
    except ValueError:
        return UNREADABLE


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of a literal, of + - * / // on numbers, or of a known name. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item, constants) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, constants)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        a, b = _number(node.left, constants), _number(node.right, constants)
        if b or not isinstance(node.op, ast.Div | ast.FloorDiv):
            return _OPERATORS[type(node.op)](a, b)
    raise UserError(f"not a literal: {ast.unparse(node)}")


def _number(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    value = literal(node, constants)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"not a number: {ast.unparse(node)}")
    return value
