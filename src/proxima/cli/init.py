"""Write a recipe, a reward function and questions to start from. They run without changes: cd FOLDER; proxima train
recipe.yaml."""

import shlex
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.data import UserError
from proxima.system.atomic_files import make_folder

STARTER = Path(__file__).parent / "starter"


def write_starter(folder: Annotated[Path, Argument("where to write; default: the current folder")] = Path(".")) -> None:
    """Copy the files to start from into a folder.

    Raises:
        UserError: one of them already exists; nothing is written.
    """
    files = {source: folder / source.name for source in sorted(STARTER.iterdir()) if source.is_file()}
    if present := [target for target in files.values() if target.exists()]:
        raise UserError(f"{', '.join(map(str, present))}: exists; nothing was written", remedy="give another folder")
    make_folder(folder)
    for source, target in files.items():
        target.write_bytes(source.read_bytes())
        print(f"wrote {target}")
    where = "" if folder == Path(".") else f"cd {shlex.quote(str(folder))} && "
    print(f"\n{where}proxima train recipe.yaml")


COMMAND = write_starter
