"""Recipe files that the command line lays over a recipe: `@cluster.yaml`, `@layouts/qwen3_30b_8xH100`."""

from collections.abc import Sequence
from pathlib import Path

from proxima.config.problems import ConfigError, nearest, one_problem
from proxima.config.recipe_reader import read_recipe
from proxima.config.tree import COMMAND_LINE, Node
from proxima.data.recipe_files import FILE, find_recipe, shipped_layouts, shipped_recipes


def read_over(word: str, below: Sequence[Node]) -> list[Node]:
    """The layers of a file over these of a recipe.

    Args:
        word: of the command line, `@FILE`.

    Raises:
        ConfigError: as `read_recipe`; or the file is a layout of proxima's, and the recipe one that it is not for.
    """
    name = word.removeprefix(FILE)
    path, layouts = find_recipe(name), shipped_layouts()
    if not name or not path.exists():
        raise _problem(word, f"no such file; {_near_layout(name)}")
    if path.resolve() in layouts.values():
        _check_layout(word, path, [Path(layer.source.text.partition(":")[0]).stem for layer in below])
    return read_recipe(path)


def refuse_layout(name: str) -> None:
    """ConfigError for a layout in the place of a recipe."""
    if name in (layouts := shipped_layouts()) and find_recipe(name) == layouts[name]:
        fitting = (recipe for recipe in shipped_recipes() if recipe.startswith(_model_of(name)))
        over = f"lay it over a recipe: {next(fitting, 'RECIPE')} {FILE}{name}"
        raise one_problem(name, f"is a layout, which says where a recipe computes, and no recipe; {over}")


def _check_layout(word: str, path: Path, recipes: Sequence[str]) -> None:
    """A layout is for the recipes whose names begin like its own."""
    model, shipped = _model_of(path.stem), {Path(name).name for name in shipped_recipes()}
    bases = [name for name in recipes if name in shipped]
    if not bases or bases[-1].startswith(model):
        return
    fitting = [FILE + layout for layout in shipped_layouts() if bases[-1].startswith(_model_of(layout))]
    remedy = f"use {' or '.join(fitting)}" if fitting else "copy it, fit the copy to your model, and lay that over"
    raise _problem(word, f"is a layout for the recipes {model}*, and this one is {bases[-1]}; {remedy}")


def _model_of(layout: str) -> str:
    """`qwen3_30b`, of `layouts/qwen3_30b_8xH100`."""
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
