"""Processes of this machine, as /proc shows them."""

from contextlib import suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie; one that ends while its state is read does not run."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
