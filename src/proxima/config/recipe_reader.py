"""Parse YAML files and `key=value` texts into trees of nodes that know file and line.

Duplicate keys, tags and anchors that contain themselves are refused; scalars are those of `scalars.py`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from proxima.config.describe import FieldInfo
from proxima.config.problems import ConfigError, one_problem
from proxima.config.scalars import Loader
from proxima.config.tree import COMMAND_LINE, FILL_IN, Node, Source, merge
from proxima.data.errors import nearest
from proxima.system.user_files import find_recipe, read_text, shipped_layouts, shipped_recipes, shown_path

LARGEST_RECIPE = 1 << 20  # bytes; a second of reading
MOST_NODES = 100_000  # a few lines of anchors within anchors can expand to billions of values


def read_recipe(path: str | Path, above: tuple[Path, ...] = ()) -> list[Node]:
    """Read the recipe and all that it extends, as layers: the lowest first, the recipe itself last.

    Args:
        path: a YAML file, a run folder, whose `config.yaml` is read, or the name of a recipe (`find_recipe`).
        above: the recipes that extend it. `extends: other.yaml` is relative to the folder of its own file; `extends:
            quickstart` is the shipped recipe.
    Raises:
        ConfigError: no such file, bad YAML (with the line), a duplicate key, a circular `extends`.
    """
    path = find_recipe(path)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.resolve() in above:
        circle = " extends ".join(shown_path(file) for file in (*above, path.resolve()))
        raise one_problem("extends", f"forms a cycle: {circle}; remove one of them")
    root = read_yaml(path)
    fields = dict(root.mapping or {})
    extends = fields.pop("extends", None)
    top = Node(fields, root.source)
    if extends is None:
        return [top]
    if not isinstance(extends.value, str):
        raise one_problem("extends", "must be the path of one recipe", extends.shown(), extends.source.text)
    base = path.parent / extends.value
    if not base.is_file():
        base = shipped_recipes().get(extends.value, base)
    if not base.is_file():
        remedy = f"no such file; the path is relative to {shown_path(path.parent)}/"
        name = str(extends.value).removesuffix(".yaml")
        if name in shipped_recipes():
            remedy += f"; the recipe that comes with proxima is extends: {name}"
        raise one_problem("extends", remedy, extends.shown(), extends.source.text)
    return [*read_recipe(base, (*above, path.resolve())), top]


def read_yaml(path: Path) -> Node:
    """Read one YAML file, whose top level must be a mapping."""
    name = shown_path(path)
    try:
        if path.is_file() and path.stat().st_size > LARGEST_RECIPE:
            raise one_problem(name, f"is larger than {LARGEST_RECIPE >> 20} MiB; a recipe is small")
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise no_text(path, error) from None
    root = _parse(text, name)
    if root is None or root.value is None:
        raise one_problem(name, "is empty; `proxima init` writes a recipe to start from")
    if root.mapping is None:
        wanted = "must be a mapping of fields (`model: …`, `task: …`)"
        raise one_problem(name, f"{wanted}; `proxima init` writes one to start from")
    return root


@lru_cache(maxsize=64)  # a sweep lays all its cells over one recipe; nodes are never changed
def _parse(text: str, name: str) -> Node | None:
    try:
        loader = Loader(text)  # refuses control characters
        lines = enumerate(text.splitlines(), 1)
        loader.stand_ins = frozenset(number for number, line in lines if re.search(rf"\s#.*\b{FILL_IN}\b", line))
        node = loader.get_single_node()
        if node is None:
            return None
        return _convert(loader, node, name, ())
    except (yaml.YAMLError, RecursionError) as error:
        raise not_yaml(name, error) from None


def _convert(loader: Loader, node: Any, name: str, parents: tuple[Any, ...]) -> Node:
    line = node.start_mark.line + 1
    place = f"{name}:{line}"
    mark = f", {FILL_IN}" if line in loader.stand_ins else ""
    source = COMMAND_LINE if name == COMMAND_LINE.text else Source(f"{place}{mark}")
    loader.converted += 1
    if loader.converted > MOST_NODES:
        raise one_problem(
            name, f"holds more than {MOST_NODES:,} values, counting each use of an anchor; a recipe is small"
        )
    if any(node is parent for parent in parents):
        raise one_problem(place, "an anchor contains itself; write the value out")
    inside = (*parents, node)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(loader, child, name, inside) for child in node.value], source)
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, name)
        loader.flatten_mapping(node)
        return Node({str(key.value): _convert(loader, child, name, inside) for key, child in node.value}, source)
    return Node(loader.construct_object(node, deep=True), source, str(node.value))


def _refuse_duplicates(node: yaml.MappingNode, name: str) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise one_problem(f"{name}:{key.start_mark.line + 1}", "a key must be a plain word")
        if key.value in seen and key.value != "<<":
            raise one_problem(f"{name}:{key.start_mark.line + 1}", f"the key {key.value!r} is given twice; keep one")
        seen.add(key.value)


def read_overrides(overrides: Sequence[str], config: FieldInfo) -> Node:
    """Parse `key=value` texts, in any order, into one layer; a value is YAML (`selection=[]`, `folder=null`,
    `train.optimizer.lr=1e-5`). ConfigError for a text without `=`, an empty part of a path, or a key given twice."""
    split = [_split(text, overrides[at:]) for at, text in enumerate(overrides, 1)]
    for key, count in Counter(key for key, _ in split).items():
        if count > 1:
            values = ", ".join(node.shown() for other, node in split if other == key)
            raise one_problem(key, f"given more than once ({values}); keep one", None, COMMAND_LINE.text)
    layer = Node({}, COMMAND_LINE)
    for key, node in sorted(split, key=lambda pair: pair[0].count(".")):
        for part in reversed(key.split(".")):
            node = Node({part: node}, COMMAND_LINE)
        layer = merge(layer, node, config)
    return layer


def _split(text: str, after: Sequence[str]) -> tuple[str, Node]:
    """The key and the value of an override; if words without `=` are `after` a list or mapping that is no YAML, the
    shell has split it at a space."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        wrong = "has an empty part before the `=`" if equals else "is not an override"
        raise one_problem(text, f"{wrong}; write key=value, for example train.steps=10", None, COMMAND_LINE.text)
    try:
        node = _parse(value, COMMAND_LINE.text)
        content = node.value if node else value or None
    except ConfigError:
        if value[:1] in ("{", "[") and any("=" not in word for word in after):
            message = f"the shell has split the value at a space: quote it, {key}='{value} …'"
            raise one_problem(key, message, value) from None
        if value.startswith("{") and ":" in value and "}" not in value:
            raise one_problem(key, "`{` is not closed", value, COMMAND_LINE.text) from None
        content = value  # a text that only looks like YAML: `data.system=Answer: [`
    return key, Node(content, COMMAND_LINE, value)


_PLAIN = {  # what PyYAML says begins with this: what it means for a recipe
    "mapping values are not allowed here": "a `:` where no field can begin: indent the fields of a section alike, and "
    "quote a text that contains `: `",
    "found character '\\t'": "a tab; indent with spaces",
    "expected <block end>, but found '-'": "a list item (`-`) among fields: indent it below its own field",
    "expected <block end>": "its indentation fits none of the lines above: indent the fields of a section alike",
    "expected ',' or '}'": "`{` is not closed or a comma is missing, in this line or above",
    "expected ',' or ']'": "a `[` that is not closed, or a missing comma, in this line or above",
    "could not find expected ':'": "a line without `:`; a field is `name: value`",
    "found unexpected end of stream": "a quotation mark that is not closed",
}


def no_text(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    """The error about a file that is missing, can't be read, or is not text."""
    name = shown_path(path)
    if not isinstance(error, OSError):
        return one_problem(name, "is not UTF-8 text; a recipe is a YAML file")
    near = near_recipe(path)
    remedy = "give a YAML file, a run folder, or a name of `proxima list recipes`"
    if near:
        remedy = f"did you mean {near}?"
    reason = f"can't be read ({error.strerror})"
    if isinstance(error, FileNotFoundError):
        reason = "no such recipe"
    return one_problem(name, f"{reason}; {remedy}")


def not_yaml(name: str, error: yaml.YAMLError | RecursionError) -> ConfigError:
    """The error about a text that is not YAML, at its line if that is known."""
    if isinstance(error, RecursionError):
        return one_problem(name, "is nested too deeply for a recipe")
    if not isinstance(error, yaml.MarkedYAMLError):
        return one_problem(name, f"not YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    line = f":{mark.line + 1}" if mark else ""
    words = in_plain_words(error)
    if not words.startswith(("the tag", "a number")):
        words = f"not YAML: {words}"
    return one_problem(f"{name}{line}", words)


def near_recipe(path: Path) -> str | None:
    """The recipe or layout with the name nearest to `path`: in its folder, in recipes/ or shipped; None if no name is
    similar."""
    shipped = shipped_recipes()
    names = {name.rpartition("/")[2]: name for name in shipped} | {
        name: name for name in (*shipped, *shipped_layouts())
    }
    for file in (*Path("recipes").glob("*.yaml"), *path.parent.glob("*.yaml")):
        names[file.stem] = shown_path(file)
    near = nearest(str(path), names) or nearest(path.stem, names)
    return None if near is None else names[near]


def in_plain_words(error: yaml.MarkedYAMLError) -> str:
    """What the user can change, or PyYAML's own words for a rare mistake."""
    said = error.problem or error.context or ""
    return next((text for start, text in _PLAIN.items() if said.startswith(start)), said)
