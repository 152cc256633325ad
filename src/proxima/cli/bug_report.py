"""Records an error that is not the user's fault: the traceback goes to a file, one line to the terminal."""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from proxima import __version__


def report_bug(error: BaseException) -> int:
    """Append the traceback to log.txt of the error's `run_folder`, else to a new file, and name that file on standard
    error.

    `PROXIMA_DEBUG=1` prints the traceback too.

    Returns: exit code 70 (`os.EX_SOFTWARE`).
    """
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("PROXIMA_DEBUG") not in (None, "", "0"):
        sys.stderr.write(trace)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    versions = f"proxima {__version__}, Python {sys.version.split()[0]}"
    written = _write(f"{versions}: {' '.join(sys.argv)}\n{trace}", getattr(error, "run_folder", None))
    remedy = f"report it with the traceback in {written}" if written else "PROXIMA_DEBUG=1 prints the traceback"
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
