"""The checksums of a saved model, in a file beside those that it is of."""

import json
from dataclasses import astuple
from pathlib import Path

from proxima.data.json_reader import load_json
from proxima.system.damage import Checksum

CHECKSUMS = "checksums.json"  # a checksum of the second line, and there the checksums of the files


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files in a folder beside them."""
    text = json.dumps({file.name: astuple(Checksum.of(file)) for file in sorted(folder.iterdir())})
    (folder / CHECKSUMS).write_text(f"{Checksum.of_bytes(text.encode()).crc32}\n{text}", encoding="utf-8")


def damage_beside_checksums(file: Path) -> str:
    """Describe how a file differs from what `write_checksums` found in its folder; empty if it does not."""
    try:
        crc32, _, text = (file.parent / CHECKSUMS).read_bytes().partition(b"\n")
    except OSError as error:
        return f"can't be checked: {CHECKSUMS} beside it can't be read ({error.strerror})"
    if Checksum.of_bytes(text).crc32.encode() != crc32:
        return f"can't be checked: {CHECKSUMS} beside it is damaged"
    recorded = load_json(text)
    if file.name in recorded:
        return Checksum(*recorded[file.name]).difference(file)
    return "is not in the folder"
