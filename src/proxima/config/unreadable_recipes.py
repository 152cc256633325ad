"""What is wrong with a recipe that can't be read, in the words of who wrote it."""

from pathlib import Path

import yaml

from proxima.config.problems import ConfigError, one_problem
from proxima.data.errors import nearest
from proxima.system.user_files import shipped_layouts, shipped_recipes, shown_path

_PLAIN = {  # what PyYAML says begins with this: what it means for a recipe
    "mapping values are not allowed here": "a `:` where no field can begin: indent the fields of a section alike, and "
    "quote a text that contains `: `",
    "found character '\\t'": "a tab; indent with spaces",
    "expected <block end>, but found '-'": "a list item (`-`) among fields: indent it below its own field",
    "expected <block end>": "its indentation fits none of the lines above: indent the fields of a section alike",
    "expected ',' or '}'": "a `{` that is not closed, or a missing comma, in this line or above",
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
    remedy = f"did you mean {near}?" if near else "give a YAML file, a run folder, or a name of `proxima list recipes`"
    reason = "no such recipe" if isinstance(error, FileNotFoundError) else f"can't be read ({error.strerror})"
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
    return one_problem(f"{name}{line}", words if words.startswith(("the tag", "a number")) else f"not YAML: {words}")


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
