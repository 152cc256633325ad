"""CRC-32: finds the bit that a disk or a copy has flipped."""

import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checksum:
    """Of a file, or of a text."""

    size: int  # bytes
    crc32: str

    @classmethod
    def of(cls, path: Path) -> "Checksum":
        """The checksum of a file, which is read."""
        crc = size = 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        return cls(size, f"{crc:08x}")

    @classmethod
    def of_bytes(cls, content: bytes) -> "Checksum":
        return cls(len(content), f"{zlib.crc32(content):08x}")
