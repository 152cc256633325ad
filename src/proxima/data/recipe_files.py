"""Finds recipes by name: those that come with proxima, and files of the user's."""

from pathlib import Path

FILE = "@"  # begins a word of the command line that names a recipe over the first
LAYOUTS = "layouts/"


def shipped_folder() -> Path:
    """The folder of the recipes that come with proxima: in the package of a wheel, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Recipes and sweeps that come with proxima by name, `quickstart` or `cpu/dapo`; those of the top folder first."""
    return {name: file for name, file in _shipped().items() if not name.startswith(LAYOUTS)}


def shipped_layouts() -> dict[str, Path]:
    """The layouts shipped with proxima, such as `layouts/qwen3_4b_8xH100`, which place a recipe on a cluster and have
    no task."""
    return {name: file for name, file in _shipped().items() if name.startswith(LAYOUTS)}


def _shipped() -> dict[str, Path]:
    folder = shipped_folder()
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def find_recipe(name: str | Path) -> Path:
    """The file, or run folder, that a user means by `name`.

    A file or a run folder of that path, else the file `NAME.yaml`, else the recipe or layout that comes with proxima,
    else the path as it is, where nothing may be.
    """
    path = Path(name)
    if path.is_file() or (path / "config.yaml").is_file():
        return path
    with_suffix = path.parent / f"{path.name}.yaml"
    return with_suffix if with_suffix.is_file() else _shipped().get(str(name), path)
