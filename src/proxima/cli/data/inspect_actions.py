"""`proxima data show`, `check` and `list`."""

import argparse
from pathlib import Path
from typing import Any

from proxima.cli.data.prepare_action import DATA, is_prepared
from proxima.cli.output import print_json
from proxima.data import UserError


def show_folder(arguments: argparse.Namespace) -> int:
    from pyarrow import parquet

    from proxima.prepare import read_card
    from proxima.prepare.dataset_card import card_markdown

    folder = Path(arguments.folder).expanduser()
    card = read_card(folder)
    if arguments.json:
        print_json(card)
        return 0
    print(card_markdown(card, arguments.folder).rstrip())
    for name in card["outputs"]:
        if not name.endswith(".parquet") or arguments.rows < 1:
            continue
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; see proxima data check {arguments.folder}")
        print(f"\n## First rows of {name}")
        for row in next(parquet.ParquetFile(folder / name).iter_batches(batch_size=arguments.rows)).to_pylist():
            facts = ", ".join(f"{key} {row[key]}" for key in ("subject", "level", "source_id") if row[key] is not None)
            print(f"\n{row['row']}{': ' + facts if facts else ''}, ×{row['repeats']}")
            for message in row["messages"]:
                print(f"  {message['role']}: " + message["content"].replace("\n", "\n    "))
            print(f"  answer: {row['answer']}")
    return 0


def check_folders(arguments: argparse.Namespace) -> int:
    from proxima.prepare import verify_folder

    found = {name: verify_folder(Path(name).expanduser()) for name in arguments.folder}
    bad = sum(status != "same" for files in found.values() for status in files.values())
    if arguments.json:
        print_json({"bad": bad, "folders": found})
    else:
        for name, files in found.items():
            print("\n".join(f"{status:<8} {Path(name) / file}" for file, status in files.items()))
        if bad:
            of = f"{bad} of {sum(map(len, found.values()))} files"
            print(f"{of} do not match the card; prepare the folder again with --overwrite")
    return 1 if bad else 0


def list_sources(arguments: argparse.Namespace) -> int:
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
    if arguments.json:
        print_json(rows)
        return 0
    for row in rows:
        state = "prepared" if row["prepared"] else f"make it: proxima data prepare {row['source']}"
        print(f"{row['folder']:<16} {row['title']}\n{'':<16} {', '.join(row['hubs'])}\n{'':<16} {state}")
    return 0
