"""Write a recipe, a reward function and questions to start from. They run without changes: cd FOLDER; proxima train
recipe.yaml. With --data the recipe and the reward are for your own file."""

import os
import shlex
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.data import UserError
from proxima.system.atomic_files import make_folder

STARTER = Path(__file__).parent / "starter"
MODEL = Path("models/smollm2-135m-instruct")


def write_starter(
    folder: Annotated[Path, Argument("where to write; default: the current folder")] = Path("."),
    *,
    data: Annotated[
        str | None, Argument("your questions and answers: a CSV, JSON Lines or Parquet file, or a pattern", "FILE")
    ] = None,
    question: Annotated[str | None, Argument("its column with the question, if no name tells it", "COLUMN")] = None,
    answer: Annotated[str | None, Argument("its column with the answer, if no name tells it", "COLUMN")] = None,
) -> None:
    """Write the files to start from into a folder.

    Raises:
        UserError: one of them already exists, or the data can't be used; nothing is written.
    """
    if data is None and (question or answer):
        raise UserError("--question and --answer name columns of --data FILE", remedy="give it too")
    sources = {source.name: source for source in sorted(STARTER.iterdir()) if source.is_file()}
    if data is None:
        names = list(sources)
    else:
        names = ["recipe.yaml", "reward.py"]
    present = [folder / name for name in names if (folder / name).exists()]
    if present:
        raise UserError(f"{', '.join(map(str, present))}: exists; nothing was written", remedy="give another folder")
    model = str(MODEL)
    if MODEL.is_dir():  # it is not downloaded once more
        model = os.path.relpath(MODEL, folder)
    if data is None:
        files = {name: source.read_text(encoding="utf-8") for name, source in sources.items()}
        files["recipe.yaml"] = files["recipe.yaml"].replace(f"path: {MODEL} ", f"path: {model} ")
    else:
        from proxima.cli.own_data import starter_for

        files = starter_for(data, folder, model, question=question, answer=answer)
    make_folder(folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    if folder == Path("."):
        where = ""
    else:
        where = f"cd {shlex.quote(str(folder))} && "
    print(f"\n{where}proxima train recipe.yaml")


COMMAND = write_starter
