"""Recipe files that the command line lays over a recipe: `@cluster.yaml`, `@layouts/qwen3_30b_8xH100`."""

from collections.abc import Sequence
from pathlib import Path

from proxima.config.problems import ConfigError, nearest, one_problem
from proxima.config.recipe_reader import read_recipe
from proxima.config.tree import COMMAND_LINE, Node
from proxima.system.recipe_files import FILE, find_recipe, shipped_layouts, shipped_recipes


def read_overlay(word: str, below: Sequence[Node]) -> list[Node]:
    """Read the layers of a file that the command line lays over a recipe's layers, `below`.

    Args:
        word: `@FILE`, from the command line.

    Raises:
        ConfigError: as `read_recipe`; or the file is a shipped layout for other recipes.
    """
    name = word.removeprefix(FILE)
    path, layouts = find_recipe(name), shipped_layouts()
    if not name or not path.exists():
        raise _problem(word, f"no such file; {_near_layout(name)}")
    if path.resolve() in layouts.values():
        _check_layout(word, path, [Path(layer.source.text.partition(":")[0]).stem for layer in below])
    return read_recipe(path)


def refuse_layout(name: str) -> None:
    """Raise ConfigError if a layout is given in place of a recipe."""
    if name in (layouts := shipped_layouts()) and find_recipe(name) == layouts[name]:
        fitting = (recipe for recipe in shipped_recipes() if recipe.startswith(_model_of(name)))
        over = f"lay it over a recipe: {next(fitting, 'RECIPE')} {FILE}{name}"
        raise one_problem(name, f"is a layout (a placement on a cluster), not a recipe; {over}")


def _check_layout(word: str, path: Path, recipes: Sequence[str]) -> None:
    """Raise ConfigError for a shipped recipe whose name does not begin with the layout's model."""
    model, shipped = _model_of(path.stem), {Path(name).name for name in shipped_recipes()}
    bases = [name for name in recipes if name in shipped]
    if not bases or bases[-1].startswith(model):
        return
    fitting = [FILE + layout for layout in shipped_layouts() if bases[-1].startswith(_model_of(layout))]
    remedy = f"use {' or '.join(fitting)}" if fitting else "copy it, fit the copy to your model, and lay that over"
    raise _problem(word, f"is a layout for the recipes {model}*, and this one is {bases[-1]}; {remedy}")


def _model_of(layout: str) -> str:
    """The model in a layout's name: `qwen3_30b` in `layouts/qwen3_30b_8xH100`."""
    return layout.rpartition("/")[2].rpartition("_")[0]


def _near_layout(name: str) -> str:
    names = {layout.rpartition("/")[2]: layout for layout in shipped_layouts()}
    files = {file.stem: str(file) for file in Path(name).parent.glob("*.yaml")}
    choices = names | {layout: layout for layout in names.values()} | files | {file: file for file in files.values()}
    near = nearest(name, choices)
    layouts = ", ".join(f"{FILE}{layout}" for layout in names.values())
    return f"did you mean {FILE}{choices[near]}?" if near else f"give {FILE}FILE.yaml, or a layout: {layouts}"


def _problem(word: str, message: str) -> ConfigError:
    return one_problem(word, message, None, COMMAND_LINE.text)
