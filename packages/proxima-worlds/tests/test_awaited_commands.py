"""What a run shows while it waits for a pull: one line that moves, or a few lines in a log."""

import io
import sys
from pathlib import Path

import pytest

from proxima_worlds import awaited_commands
from proxima_worlds.awaited_commands import CLEAR, run_shown
from proxima_worlds.containers import ensure_image

PULL = ("sh", "-c", "echo Copying blob 1; echo; echo Writing manifest >&2; exit 3")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = Terminal()
    assert run_shown(PULL, 60.0, shown) == (3, "Writing manifest")
    text = shown.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    first, *_, last = text.removesuffix("\n").split(CLEAR)[1:]
    assert first.startswith("the run waits for: sh -c echo Copying blob 1") and len(last) <= 59


def test_the_line_moves_while_the_command_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends once the line has been written five times."""
    monkeypatch.setattr(awaited_commands, "TICK", 0.001)
    release = tmp_path / "go"

    class Releasing(Terminal):
        def write(self, text: str) -> int:
            if self.getvalue().count(CLEAR) == 5:
                release.touch()
            return super().write(text)

    shown = Releasing()
    assert run_shown(("sh", "-c", f"until [ -e {release} ]; do sleep 0.01; done"), 60.0, shown) == (0, "")
    assert shown.getvalue().count(CLEAR) >= 5 and shown.getvalue().count("\n") == 1


def test_a_log_has_a_line_at_the_beginning_and_one_at_the_end() -> None:
    shown = io.StringIO()
    assert run_shown(PULL, 60.0, shown) == (3, "Writing manifest")
    first, last = shown.getvalue().splitlines()
    assert CLEAR not in shown.getvalue()
    assert first.startswith("the run waits for: sh -c") and last.endswith("Writing manifest")


def test_what_takes_too_long_is_killed() -> None:
    assert run_shown(("sleep", "1000"), 0.01, io.StringIO())[1] == "took longer than 0.01 s"


def test_a_pull_names_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "podman"
    there = tmp_path / "there"
    program.write_text(
        f"#!/bin/sh\ncase $1 in image) [ -e {there} ] && echo sha256:1;; "
        f"pull) echo Copying blob 7; touch {there};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert ensure_image(str(program), "alpine:3") == "sha256:1"
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith("the run waits for: podman pull alpine:3") and last.endswith("Copying blob 7")
