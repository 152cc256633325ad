"""The records of a metrics.jsonl that grows, for readers that ask again and again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.system.jsonl import check_record, lines_from

LAST = 256  # bytes compared to detect a rewritten file


@dataclass(eq=False)
class GrowingRecords:
    """The records of metrics.jsonl as of the last `poll`."""

    file: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0
    last: bytes | None = b""  # the bytes before `end`; they differ if the file was rewritten. None: read it anew

    def poll(self) -> list[dict[str, Any]]:
        """Parse the lines that were appended since the last call and return their records; an incomplete line waits for
        the next call. A file that was rewritten, as by a resume, is read from its start.

        Raises:
            OSError: the file can't be read. UserError: a line of it is damaged; `records` has those before it.
        """
        with self.file.open("rb") as file:
            file.seek(self.end - len(self.last or b""))
            if self.last is None or file.read(len(self.last)) != self.last:
                self.records, self.end = [], 0
            known = len(self.records)
            try:
                for record, end in lines_from(self.file, self.end):
                    check_record(record, self.file.name)
                    self.records.append(record)
                    self.end = end
            except UserError:
                self.last = None  # the line may be the rest of one, if the file was just rewritten
                raise
            file.seek(max(0, self.end - LAST))
            self.last = file.read(min(LAST, self.end))
        return self.records[known:]
