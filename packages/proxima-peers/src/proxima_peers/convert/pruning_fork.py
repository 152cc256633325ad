"""The programs of completion pruning's authors (lzhxmu/CPPO): a fork of open-r1, whose trainer and rewards are its own
in every run, whether it prunes, is the baseline (`grpo_gsm.py` without `--pruning`) or evaluates (`eval_gsm.py`)."""

import re
from functools import cache
from pathlib import Path

from proxima.system.user_files import read_text
from proxima_peers.convert.options import Options

PROGRAM = re.compile(r"\b(grpo|eval)_(?:gsm|math)\.py\b")


def is_pruning_fork(o: Options) -> bool:
    """True for a file that prunes, or a script that starts one of these programs."""
    return o.given("pruning") or _program(o.file) is not None


def only_evaluates(o: Options) -> bool:
    """True for a script that starts a program of evaluation."""
    return _program(o.file) == "eval"


@cache
def _program(name: str) -> str | None:
    file = Path(name)
    if file.suffix not in (".sh", ".bash") or not file.is_file():
        return None
    programs = PROGRAM.findall(read_text(file, "utf-8-sig"))
    return programs[-1] if programs else None
