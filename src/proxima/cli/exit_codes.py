"""Turns an exception of a command into its exit code and a line on standard error; a bug's traceback goes to a file."""

import os
import pathlib
import sys
import tempfile
import time
import traceback
from pathlib import Path

from proxima.data.errors import LONGEST_VALUE, UserError, abbreviated
from proxima.system.full_disk import is_disk_full
from proxima.system.out_of_memory import is_out_of_memory
from proxima.version import __version__
from proxima.view.formatting import visible

INTERRUPTED = 130
SAME_ERROR = 30.0  # seconds in which rank 0 reports what all ranks have found, and the launcher ends the others


def report_error(error: Exception | KeyboardInterrupt) -> int:
    """Report an exception; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # `proxima list | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SAME_ERROR)
    if isinstance(error, UserError):
        return _refuse(str(error))
    if is_disk_full(error):
        place = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{place}no space left on the disk; free some space, then run again with --resume", code=1)
    reason = _path_error(error)
    if reason:
        return _refuse(f"{reason}; give another path")
    if is_out_of_memory(error):
        remedy = "lower train.tokens_per_micro_batch, sampling.max_tokens or engine.slots, or raise the limit"
        return _refuse(f"out of memory: {' '.join(str(error).split())[:200] or 'an allocation failed'}; {remedy}", 1)
    return report_bug(error)


def _path_error(error: Exception) -> str | None:
    """Describe an error about a path that the user gave, whichever operation failed; None for other errors."""
    if isinstance(error, OSError) and error.filename is not None:
        if isinstance(error.filename, str | bytes):
            path = os.fsdecode(error.filename)
        else:
            path = str(error.filename)
        if Path(path).is_relative_to(Path(__file__).parents[1]):  # a file of proxima's is missing: not the user's fault
            return None
        return f"{abbreviated(path, LONGEST_VALUE)}: {error.strerror}"
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    if isinstance(error, RuntimeError) and raised_in == [pathlib.__file__]:  # a loop of symbolic links, `~nobody`
        return abbreviated(str(error).rstrip("."), LONGEST_VALUE)
    return None


def _refuse(text: str, code: int = 2) -> int:
    for line in text.splitlines():  # names in it may be untrusted, and a terminal obeys escape sequences
        print(f"error: {_rank_name()}{visible(line)}", file=sys.stderr)
    return code


def _rank_name() -> str:
    """`rank 2 on HOST: `; empty in the process that reports for the run."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return ""
    return f"rank {rank} on {os.uname().nodename}: "


def report_bug(error: BaseException) -> int:
    """Append the traceback to log.txt of the error's `run_folder`, else to a new file, and name that file on standard
    error.

    `PROXIMA_DEBUG=1` prints the traceback too.

    Returns: exit code 70 (`os.EX_SOFTWARE`).
    """
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("PROXIMA_DEBUG") not in (None, "", "0"):
        sys.stderr.write(trace)
    what = " ".join(f"{_rank_name()}{type(error).__name__}: {error}".split())
    versions = f"proxima {__version__}, Python {sys.version.split()[0]}"
    written = _write(f"{versions}: {' '.join(sys.argv)}\n{trace}", vars(error).get("run_folder"))
    if written:
        remedy = f"report it with the traceback in {written}"
    else:
        remedy = "PROXIMA_DEBUG=1 prints the traceback"
    print(f"internal error: {what[:300]}; this is a bug in proxima or in a spec of yours: {remedy}", file=sys.stderr)
    return os.EX_SOFTWARE


def _write(text: str, run_folder: Path | None) -> Path | None:
    """Append the text to the first file that can be written and return its path; None if there is none."""
    name = f"proxima-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    places = [Path("runs") / name, Path(tempfile.gettempdir()) / name]
    if run_folder is not None:
        places.insert(0, run_folder / "log.txt")
    for place in places:
        try:
            with place.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return place
        except OSError:  # no such folder, no permission, a full disk: try the next place
            continue
    return None
