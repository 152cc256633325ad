"""CRC-32 checksums: they detect bits flipped on disk or in a copy."""

import json
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path

from proxima.data.json_reader import load_json

CHECKSUMS = "checksums.json"  # of a folder: a checksum of the second line, and there the checksums of its files


@dataclass(frozen=True)
class Checksum:
    """Size and CRC-32 of a file or of bytes."""

    size: int  # bytes
    crc32: str

    @classmethod
    def of(cls, path: Path) -> "Checksum":
        """Read a file and return its checksum."""
        crc = size = 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        return cls(size, f"{crc:08x}")

    @classmethod
    def of_bytes(cls, content: bytes) -> "Checksum":
        return cls(len(content), f"{zlib.crc32(content):08x}")

    def difference(self, file: Path) -> str:
        """Describe how a file differs from the one with this checksum; empty if it does not."""
        try:
            now = Checksum.of(file)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"can't be read ({error.strerror})"
        if now.size != self.size:
            return f"has {now.size:,} bytes, written were {self.size:,}"
        return "" if now == self else "differs from what was written"


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files in a folder beside them."""
    text = json.dumps({file.name: astuple(Checksum.of(file)) for file in sorted(folder.iterdir())})
    (folder / CHECKSUMS).write_text(f"{Checksum.of_bytes(text.encode()).crc32}\n{text}")


def damage_beside_checksums(file: Path) -> str:
    """Describe how a file differs from what `write_checksums` found in its folder; empty if it does not."""
    try:
        crc32, _, text = (file.parent / CHECKSUMS).read_bytes().partition(b"\n")
    except OSError as error:
        return f"can't be checked: {CHECKSUMS} beside it can't be read ({error.strerror})"
    if Checksum.of_bytes(text).crc32.encode() != crc32:
        return f"can't be checked: {CHECKSUMS} beside it is damaged"
    recorded = load_json(text)
    return Checksum(*recorded[file.name]).difference(file) if file.name in recorded else "is not in the folder"
