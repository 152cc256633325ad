"""`proxima`: runs a command and turns its exceptions into exit codes."""

import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxima.cli.commands import COMMANDS, call_of, load_command
from proxima.data.errors import UserError
from proxima.system.openmp import limit_spinning
from proxima.system.proxies import exempt_this_machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    if sys.platform == "win32":
        print("error: proxima needs Linux or macOS; on Windows install and run it in WSL2", file=sys.stderr)
        return 2
    if argv is None:
        enter_utf8()
    _prepare_process()
    words = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal can't show must not abort a run
    if argv is None and "RANK" not in os.environ and words[:1] in (["train"], ["explain"]):
        # Traversing a million imported objects takes half a second. A run enables it when its model is loaded.
        gc.disable()
    return exit_code(lambda: _call(words)())


def train_rank(**arguments: Any) -> int:
    """Entry point of a cluster's ranks: `train_recipe`, with the exit codes and messages of the command line."""
    _prepare_process()
    train, _ = load_command("train", COMMANDS["train"][0])
    assert not isinstance(train, Mapping)
    return exit_code(lambda: train(**arguments))


def enter_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, where the locale gives paths another encoding: ASCII lacks most
    letters, and libraries that are not written in Python take paths as UTF-8 everywhere. A terminal of another encoding
    keeps it."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    environment = os.environ | {"PYTHONUTF8": "1"}
    if encoding != "ascii":
        environment.setdefault("PYTHONIOENCODING", f"{encoding}:replace")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _prepare_process() -> None:
    """What this process and those that it starts inherit."""
    limit_spinning()
    os.environ |= exempt_this_machine()


def _call(words: Sequence[str]) -> Callable[[], int | None]:
    """The call of a command that a command line asks for."""
    if any("\0" in word for word in words):
        raise UserError("an argument has a NUL character", remedy="leave it out")
    if words and words[0] in COMMANDS:
        return call_of(words[0], words[1:])
    from proxima.cli.help_page import answer  # which no command needs

    return answer(words)


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command; an exception becomes an exit code, and a message on standard error."""
    if "SLURM_PROCID" in os.environ:
        from proxima.runtime.placement.launcher import adopt_launcher

        adopt_launcher()
    if "RANK" in os.environ:  # torch logs many lines about a process that has exited
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return int(run() or 0)
    except (Exception, KeyboardInterrupt) as error:
        from proxima.cli.exit_codes import report_error  # a command without errors needs it not

        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
