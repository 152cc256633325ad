"""`proxima data check`: compare prepared folders with their cards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from proxima.cli.output import AsJson, print_json
from proxima.cli.parameters import Argument


def check_folders(folder: Annotated[Sequence[str], Argument(words="+")], *, as_json: AsJson = False) -> int:
    """Compare folders with the hashes in their cards; exit code 1 if a file differs."""
    from proxima.prepare.dataset_card import verify_folder

    folders = {name: verify_folder(Path(name).expanduser()) for name in folder}
    bad = sum(status != "same" for files in folders.values() for status in files.values())
    if as_json:
        print_json({"bad": bad, "folders": folders})
    else:
        for name, files in folders.items():
            print("\n".join(f"{status:<8} {Path(name) / file}" for file, status in files.items()))
        if bad:
            of = f"{bad} of {sum(map(len, folders.values()))} files"
            print(f"{of} do not match the card; prepare the folder again with --overwrite")
    return 1 if bad else 0
