"""Show a recipe: what is trained and the batch arithmetic; then the values that differ from the defaults, with their
origin, and with --all every value with its meaning. Memory and time are those of `proxima plan`.

Reads no weights and needs no data: missing data files are warnings. Files that are here and that `train` would refuse
are an error. Runs only proxima's own code, unless --import-code is given."""

from typing import Annotated

from proxima.cli.parameters import Argument, AsJson, ImportCode, Overrides, Recipe


def explain(
    recipe: Recipe,
    override: Overrides = (),
    *,
    everything: Annotated[bool, Argument("show every value, with its origin and meaning", flag="--all")] = False,
    as_yaml: Annotated[bool, Argument("print the resolved config as a recipe", flag="--yaml")] = False,
    import_code: ImportCode = False,
    as_json: AsJson = False,
) -> None:
    """Print the summary and the values of the recipe, then raise ConfigError if it has mistakes."""
    from proxima.cli.explanation import explain_recipe

    explain_recipe(recipe, override, everything=everything, as_yaml=as_yaml, import_code=import_code, as_json=as_json)


COMMAND = explain
