"""Reads a server's log: its current activity, and the cause of its death."""

import re
from textwrap import shorten

# `(EngineCore pid=1234) INFO 11-21 09:02:38 [core.py:93] Loading weights` → `Loading weights`
_PREFIX = re.compile(r"^(\([^()]* pid=\d+\) ?)*((INFO|WARNING|ERROR|DEBUG|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?")
_ERROR = re.compile(
    r"^(?:[\w.]+: error: |(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b ?(?::|$)|Value error, |\[Errno|Killed\b)"
)
_KILLED = re.compile(r"out of memory|cannot allocate memory|std::bad_alloc|oom[- ]kill", re.IGNORECASE)
_WRAPPERS = (  # errors that only wrap another one
    "engine core initialization failed",
    "see root cause above",
    "enginecore encountered",
    "worker failed with",
    "validation error for",
)
WIDTH = 300  # most characters of a line that explains a death


def doing(text: str) -> str:
    """The last line of the log that reads like a sentence, shortened; empty if there is none."""
    for line in reversed(text.splitlines()):
        words = _PREFIX.sub("", line).strip()
        if len(re.findall(r"[A-Za-z]{2,}", words)) > 1 and not words.startswith(("File ", "Traceback", "warnings.")):
            return shorten(words, 90, placeholder=" …")
    return ""


def last_error(text: str) -> str:
    """The line that explains why a server died; the last line if none does; empty for an empty log.

    Of several exceptions, the first one since the last start that does not merely wrap another counts.
    """
    lines = [words for line in text.splitlines() if (words := _PREFIX.sub("", line).strip())]
    errors = [line for line in lines if _ERROR.match(line) and not line.startswith(("SystemExit", "KeyboardInterrupt"))]
    causes = [line for line in errors if not any(wrapper in line.lower() for wrapper in _WRAPPERS)]
    memory = [line for line in lines if _KILLED.search(line)]
    return shorten([*causes, *errors, *memory, *reversed(lines), ""][0], WIDTH, placeholder=" …")
