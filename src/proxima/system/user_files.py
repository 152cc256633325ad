"""Files that a user names: recipes by name, those shipped with proxima among them, and the text of any file."""

import errno
import os
import stat
from functools import cache
from pathlib import Path

LARGEST = 1 << 28  # bytes; of a recipe or a file of records
POINTER = b"version https://git-lfs.github.com/spec/"  # how git-lfs begins the file that stands for a large one
POINTER_BOUND = "is a git-lfs pointer, not the file that it stands for"
PULL = "run `git lfs pull` in its repository"
FILE = "@"  # prefix of a command-line word that names a recipe laid over the first one
LAYOUTS = "layouts/"


def find_recipe(name: str | Path) -> Path:
    """The file or run folder that a user means by `name`.

    A file or run folder at that path, else the file `NAME.yaml`, else the shipped recipe or layout, else the path
    itself, which may not exist.
    """
    path = Path(name)
    if path.is_file() or (path / "config.yaml").is_file():
        return path
    with_suffix = path.parent / f"{path.name}.yaml"
    if with_suffix.is_file():
        return with_suffix
    return _files_below(shipped_folder()).get(str(name), path)


def shown_path(path: Path) -> str:
    """The path as a user would type it: relative if it is below the current folder; elsewhere the name of a shipped
    recipe, or the absolute path."""
    relative = os.path.relpath(path)
    if not relative.startswith("..") or not path.is_absolute():
        return relative
    plain = Path(os.path.normpath(path))
    shipped = plain.suffix == ".yaml" and plain.is_relative_to(shipped_folder())
    if shipped:
        return plain.relative_to(shipped_folder()).with_suffix("").as_posix()
    return str(plain)


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes and sweeps by name, such as `quickstart` or `cpu/dapo`; those of the top folder first."""
    return {name: file for name, file in _files_below(shipped_folder()).items() if not name.startswith(LAYOUTS)}


def shipped_layouts() -> dict[str, Path]:
    """The shipped layouts by name, such as `layouts/qwen3_4b_8xH100`: laid over a recipe, they set its placement on a
    cluster and no task."""
    return {name: file for name, file in _files_below(shipped_folder()).items() if name.startswith(LAYOUTS)}


def shipped_folder() -> Path:
    """The folder of the recipes shipped with proxima: inside the package of a wheel, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    if installed.is_dir():
        return installed
    return package.parents[1] / "recipes"


@cache  # it takes 7 ms
def _files_below(folder: Path) -> dict[str, Path]:
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def is_pointer(file: Path) -> bool:
    """True if git-lfs has left a pointer in the place of a file. OSError: it can't be read."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file or a pipe; newlines become `\\n`.

    Raises:
        OSError: it can't be read, is a device or a git-lfs pointer, or is larger than `LARGEST`; the error has the
            path.
        UnicodeDecodeError: it is not text in this encoding.
    """
    try:
        with path.open("rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ENODEV, "a device, not a file", str(path))
            content = file.read(LARGEST + 1)
    except ValueError:  # the path has a NUL character
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        error.filename = str(path)  # a failed read names no file
        raise
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    if content.startswith(POINTER):
        raise OSError(errno.ENODATA, f"it {POINTER_BOUND}; {PULL}", str(path))
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
