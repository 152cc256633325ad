"""CRC-32 checksums: they detect bits flipped on disk or in a copy."""

import zlib
from dataclasses import dataclass
from pathlib import Path


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
