"""The command line itself: help, usage, exit codes."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from proxima import __version__
from proxima.cli import exit_codes
from proxima.cli.commands import COMMANDS, GROUPS, load_command
from proxima.cli.help_page import WITH_ACTIONS
from proxima.cli.main import exit_code, main
from proxima.config.families import OFFLINE
from proxima.data import UserError
from proxima.data.policy_batch import PolicyBatch
from tests.warm import WarmPopen, run_warm

SOURCES = str(Path(__file__).resolve().parents[2] / "src")


HELP_THEN_LOOK = """
import sys
from proxima.cli.main import main
try:
    main(["--help"])
finally:
    sys.exit(len({"torch", "numpy", "transformers"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_help_lists_every_command_and_imports_no_torch(here):
    command, environment = [sys.executable, "-c", HELP_THEN_LOOK], {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"    {name} " in done.stdout for name in COMMANDS)


LOAD_ALL_COMMANDS = """
import sys
from proxima.cli.commands import load_command
from proxima.cli.commands import COMMANDS
for name, (place, _) in COMMANDS.items():
    load_command(name, place)
    if heavy := {"torch", "transformers", "pyarrow", "starlette"} & set(sys.modules):
        sys.exit(f"{name} loads {heavy}")
"""


@pytest.mark.slow
def test_no_help_of_a_command_loads_torch():
    """A command's module has its options; its function imports what does the work."""
    done = subprocess.run([sys.executable, "-c", LOAD_ALL_COMMANDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LOOK_FOR_GARBAGE = """
import gc
from proxima.cli import main
from proxima.runtime.launch import run

load = run.load_models

def load_weights(*arguments):
    print(gc.isenabled())
    loaded = load(*arguments)
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
    return loaded

run.load_models = load_weights
main.main()
"""


@pytest.mark.slow
def test_imports_of_a_training_command_are_not_searched_for_garbage(here, recipe):
    words = ["train", recipe(), "train.steps=1", "folder=run", "--quiet"]
    code, out, err = run_warm([sys.executable, "-c", LOOK_FOR_GARBAGE, *words], cwd=here, text=True)
    assert (code, out.splitlines()[:2]) == (0, ["False", "True True"]), err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command(proxima, command):
    code, out, err = proxima(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: proxima {command} ")
    assert max(map(len, out.splitlines())) <= 100


def test_the_help_groups_the_commands(proxima):
    _, out, _ = proxima("--help")
    assert re.findall(r"^  ([a-z]+)$", out, re.MULTILINE) == [*GROUPS]
    assert re.findall(r"^    ([\w-]+) ", out, re.MULTILINE) == [*COMMANDS] and len(COMMANDS) == 20


def test_the_help_has_the_actions_of_a_command_and_their_option_groups(done):
    text = " ".join(done("reward", "--help").split())
    assert "actions: ACTION score score the texts of a file" in text and "serve serve a reward model over HTTP" in text
    assert "Raises" not in text  # the first paragraph of a docstring, and no more
    text = done("reward", "serve", "--help")
    assert text.count("limits of a request:\n") == 1 and "until it is scored; default: 300" in text


def test_the_help_of_train_names_the_section_of_each_family(proxima):
    _, out, _ = proxima("train", "--help")
    assert all(f"`{family.own}`" in out for family in OFFLINE)
    assert "proxima train runs/mine --resume" in " ".join(out.split())


def test_version(proxima):
    assert proxima("--version") == (0, f"proxima {__version__}\n", "")


def test_commands_with_actions():
    commands = {name: load_command(name, place)[0] for name, (place, _) in COMMANDS.items()}
    assert tuple(sorted(name for name, command in commands.items() if isinstance(command, dict))) == WITH_ACTIONS


def test_no_command_shows_the_help(done):
    out = done()
    assert "commands:" in out


def raising(error):
    def problem():
        raise error

    return problem


def wrong_shape():
    """A ValueError of proxima's own code: only `UserError` is the user's."""
    PolicyBatch.from_padded(torch.ones(3), log_prob=torch.ones(3))


NO_MEMORY = "error: out of memory: .*; lower train.tokens_per_micro_batch"
TORCH_ON_A_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you ...")
FULL = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/mnt/runs")
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS), "/mnt/runs")
BUG = "internal error: {}.*; this is a bug in .*: report it with the traceback in runs/proxima-error-.*.txt$"


@pytest.mark.parametrize(
    ("problem", "code", "line"),
    [
        (raising(KeyError("a bug")), 70, BUG.format("KeyError: 'a bug'")),
        (lambda: int("x"), 70, BUG.format("ValueError")),
        (lambda: os.stat("\0"), 70, BUG.format("ValueError")),
        (wrong_shape, 70, BUG.format(r"ValueError: from_padded.mask: shape \[3\]")),
        (raising(MemoryError()), 1, NO_MEMORY),
        (raising(TORCH_ON_A_CPU), 1, NO_MEMORY),
        (raising(type("OutOfMemoryError", (RuntimeError,), {})("CUDA")), 1, NO_MEMORY),
        (raising(KeyboardInterrupt()), 130, "interrupted$"),
        (raising(READ_ONLY), 2, "error: /mnt/runs: Read-only file system; give another path$"),
        (
            raising(FULL),
            1,
            "error: /mnt/runs: no space left on the disk; free some space, then run again with --resume$",
        ),
    ],
)
def test_what_a_command_raises_is_an_exit_code_and_one_line(proxima, monkeypatch, here, problem, code, line):
    monkeypatch.setattr("proxima.cli.doctor.describe_machine", problem)
    (here / "runs").mkdir()
    assert (output := proxima("doctor"))[:2] == (code, "")
    assert re.match(line, output[2]) and len(output[2].splitlines()) == 1
    files = [*(here / "runs").iterdir()]
    assert len(files) == (code == 70) and all("Traceback (most recent call last)" in file.read_text() for file in files)


def test_the_traceback_can_be_printed(proxima, monkeypatch, here):
    monkeypatch.setattr("proxima.cli.doctor.describe_machine", raising(KeyError("a bug")))
    monkeypatch.setenv("PROXIMA_DEBUG", "1")
    code, _, err = proxima("doctor")
    assert code == 70 and err.startswith("Traceback (most recent call last)") and "KeyError: 'a bug'" in err


@pytest.mark.slow
def test_a_bug_in_a_run_is_in_its_log(proxima, monkeypatch, recipe, here):
    from proxima.runtime.loop.controller import Controller

    async def run(self):
        raise ValueError("a bug")

    monkeypatch.setattr(Controller, "run", run)
    code, _, err = proxima("train", recipe(), "folder=run", "--quiet")
    assert code == 70 and err.endswith("report it with the traceback in run/log.txt\n")
    log = (here / "run" / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log and "ValueError: a bug" in log


@pytest.mark.parametrize(("error", "code"), [(UserError("wrong", remedy="mend it"), 2), (ValueError("a bug"), 70)])
def test_another_rank_reports_what_rank_0_has_not_ended_it_for(error, code, monkeypatch, capsys, here):
    waited = list[float]()
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "3")

    def fail():
        raise error

    assert exit_code(fail) == code and waited == [exit_codes.SAME_ERROR]
    err = capsys.readouterr().err
    assert f"error: rank 3 on {os.uname().nodename}: " in err and err.count("rank 3") == 1


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(here):
    """It has more to say than a pipe holds."""
    command = [sys.executable, "-m", "proxima.cli.main", "list", "--json"]
    with WarmPopen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "again"), [(signal.SIGINT, "press Ctrl-C again"), (signal.SIGTERM, "send SIGTERM again")]
)
def test_a_signal_leaves_a_checkpoint_and_130(sent, again, here, recipe):
    path = recipe()
    command = [sys.executable, "-m", "proxima.cli.main", "train", path, "train.steps=100000", "folder=run"]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    process = WarmPopen(command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = here / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and '"train"' in metrics.read_text()):
        time.sleep(0.05)
    process.send_signal(sent)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert again in (here / "run" / "log.txt").read_text()
    assert list((here / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_terminal_without_unicode(monkeypatch, recipe):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["explain", recipe(), "data.system=Grüezi"]) == 0
    terminal.flush()
    assert b"Gr?ezi" in terminal.buffer.getvalue()
