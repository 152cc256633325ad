"""`proxima data show`, `check` and `list`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from proxima.cli.data.prepare_action import DATA, is_prepared
from proxima.cli.output import AsJson, print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError


def show_folder(
    folder: Annotated[str, Argument()],
    *,
    rows: Annotated[int, Argument("rows to print of each side; 3")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print the card of a prepared folder and a few of its rows."""
    from pyarrow import parquet

    from proxima.prepare import read_card
    from proxima.prepare.dataset_card import card_markdown

    path = Path(folder).expanduser()
    card = read_card(path)
    if as_json:
        return print_json(card)
    print(card_markdown(card, folder).rstrip())
    for table in (file for file in card["outputs"] if file.endswith(".parquet") and rows > 0):
        if not (path / table).is_file():
            raise UserError(f"{path / table} is missing; see proxima data check {folder}")
        print(f"\n## First rows of {table}")
        for row in next(parquet.ParquetFile(path / table).iter_batches(batch_size=rows)).to_pylist():
            facts = ", ".join(f"{key} {row[key]}" for key in ("subject", "level", "source_id") if row[key] is not None)
            print(f"\n{row['row']}{': ' + facts if facts else ''}, ×{row['repeats']}")
            for message in row["messages"]:
                print(f"  {message['role']}: " + message["content"].replace("\n", "\n    "))
            print(f"  answer: {row['answer']}")
    return None


def check_folders(folder: Annotated[Sequence[str], Argument(words="+")], *, as_json: AsJson = False) -> int:
    """Compare folders with the hashes in their cards; exit code 1 if a file differs."""
    from proxima.prepare import verify_folder

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


def list_sources(*, as_json: AsJson = False) -> None:
    """List the data sets that can be prepared, where they are published, and which of them are in data/."""
    from proxima.prepare import SOURCES

    rows: list[dict[str, Any]] = [
        {
            "source": source,
            "name": part.name,
            "title": part.title,
            "hubs": [hub.name for hub in part.hubs],
            "license": part.license,
            "template": part.template,
            "folder": str(DATA / part.name),
            "prepared": is_prepared(DATA / part.name),
        }
        for source, parts in SOURCES.items()
        for part in parts
    ]
    if as_json:
        return print_json(rows)
    for row in rows:
        state = "prepared" if row["prepared"] else f"make it: proxima data prepare {row['source']}"
        print(f"{row['folder']:<16} {row['title']}\n{'':<16} {', '.join(row['hubs'])}\n{'':<16} {state}")
    return None
