"""Real processes over gloo: whatever a rank dies of, rank 0 says it in one line, and no process is left."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kills.ranks import campaign, weights
from proxima.cli.main import main
from tests.processes import eventually
from tests.runtime.placement.launched import launched, one_by_one, ours, processes, ranked, started

FAULTY = "tests.runtime.placement.faulty_loss:Faulty"
HOST = os.uname().nodename
Tiny = Callable[..., Path]


def short(model: Path, folder: Path, how: str = "warn", rank: int = 1, **changes: Any) -> list[str]:
    """The words of a run of two steps, in whose first update something happens to a rank."""
    loss = {"preset": "grpo", "surrogate": {"kind": FAULTY, "how": how, "rank": rank}}
    small = {"train__steps": 2, "train__prompts_per_step": 2, "eval__task": None, "eval__every": 0}
    return ranked(model, folder, algorithm=loss, **small | changes)


@pytest.mark.slow
def test_an_exception_of_one_rank_is_the_line_of_the_run(tiny_model: Tiny, tmp_path: Path) -> None:
    code, printed = launched(short(tiny_model(), tmp_path / "run", "raise"), output=tmp_path / "out")
    work = r"update 1, micro-batch 1 of 1, \d+ tokens"
    line = rf"error: rank 1 on {re.escape(HOST)}: MemoryError: {work}: this rank has no memory left"
    assert code == 1
    assert re.search(f"{line}; its traceback is in log.txt; resume with --resume\n", printed)
    assert len(re.findall(line, (tmp_path / "out").read_text())) == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert '[rank 1]     raise MemoryError("this rank has no memory left")' in log
    assert "Connection closed" not in printed


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_before_torchrun_says_anything(tiny_model: Tiny, tmp_path: Path) -> None:
    code, _ = launched(short(tiny_model(), tmp_path / "run", "kill"), output=tmp_path / "out")
    text = (tmp_path / "out").read_text()
    start = f"error: rank 1 on {HOST} died during update of policy, update "
    assert code == 1
    assert text.count(start) == 1
    assert text.index(start) < text.index("Root Cause")
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()


RANKS = "tests/runtime/placement/test_failing_ranks.py"
WATCH = "tests/runtime/placement/test_rank_watch.py::"


@pytest.mark.waits
@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(how, words, marks=pytest.mark.campaign(WATCH + sibling))
        for how, words, sibling in (
            ("stop", "has not responded for", "test_a_silent_rank_is_named_and_then_given_up"),
            ("sleep", "made no progress for", "test_the_rank_that_differs"),
        )
    ],
)
def test_a_rank_that_hangs_is_named_and_ends_the_run(tiny_model: Tiny, tmp_path: Path, how: str, words: str) -> None:
    command = short(tiny_model(), tmp_path / "run", how, placement__timeout=20.0)
    module = "tests.runtime.placement.patient_run"
    _, printed = launched(command, output=tmp_path / "out", module=module)
    assert f"WARNING rank 1 on {HOST} {words}" in printed
    assert f"error: rank 1 on {HOST} {words}" in printed
    assert "longer than placement.timeout=20; if it is only slow, raise placement.timeout; resume with" in printed


@pytest.mark.slow
@pytest.mark.campaign("tests/runtime/placement/test_lifeline.py::test_a_rank_ends_with_rank_0_and_is_done_only_then")
def test_the_other_ranks_end_when_rank_0_is_killed(tiny_model: Tiny, tmp_path: Path) -> None:
    code, printed = launched(short(tiny_model(), tmp_path / "run", "kill", 0), output=tmp_path / "out")
    assert code == 1
    assert "error" not in printed.lower()  # quietly


@pytest.mark.slow
def test_a_mistake_in_the_recipe_is_one_line(tiny_model: Tiny, tmp_path: Path) -> None:
    """Here one that the model's config shows."""
    words = ranked(tiny_model("gpt2"), tmp_path / "run", placement__tensor_parallel=2)
    code, printed = launched(words, output=tmp_path / "out")
    line = "is for architectures with a plan of transformers, and gpt2, of model.path, has none; set it to 1"
    assert code == 1  # torchrun's; that of rank 0 is in its table
    assert printed == f"error: placement.tensor_parallel=2 ({tmp_path}/run.yaml:1): {line}\n"
    text = (tmp_path / "out").read_text()
    assert text.count("error: ") == 1 and "exitcode  : 2 " in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_with_other_recipes_are_refused_before_a_model_loads(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run")
    first, second = one_by_one(words, [words[0], "seed=4", *words[1:]])
    line = f"error: rank 1 on {HOST} differs from rank 0 on {HOST} in seed: 4 there, 3 here; start every rank with "
    assert first[:2] == (2, f"{line}one command line, and one recipe\n")
    assert second == (1, "", "")
    assert not (tmp_path / "run").exists()


def test_several_processes_of_a_local_run(tiny_model: Tiny, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *ranked(tiny_model(), tmp_path / "run"), "placement=local"]) == 2
    line = "runs one process, but a launcher has started 2; set placement=torchrun"
    assert capsys.readouterr().err == f"error: placement.kind=local (command line): {line}\n"


@pytest.mark.slow
@pytest.mark.campaign("tests/runtime/test_resumed_runs.py::test_a_resumed_run_equals_an_unbroken_one[policy]")
def test_ctrl_c_writes_a_checkpoint_and_the_resumed_run_is_an_unbroken_one(tiny_model: Tiny, tmp_path: Path) -> None:
    """In the unbroken one a rank warns."""
    hold, held = tmp_path / "hold", tmp_path / "hold.held"
    reward = [{"kind": "tests.runtime.tiny_run:Even", "hold": str(hold)}]
    output = tmp_path / "out"
    code, printed = launched(short(tiny_model(), tmp_path / "whole", reward=reward, train__steps=3), output=output)
    assert code == 0 and "a rank warns" not in printed and printed.count("loading model") == 1
    assert "UserWarning: a rank warns" in (tmp_path / "whole" / "log.txt").read_text()

    words = short(tiny_model(), tmp_path / "run", reward=reward, train__steps=3)
    hold.write_text("2")  # a prompt of the second step
    with started(words, output=output) as process:
        eventually(held.exists, output)
        process.send_signal(signal.SIGINT)
        # rank 0 has it: it is the first
        eventually(lambda: output.read_text().count("closing signal SIGINT") == 2, output)
        hold.unlink()
        process.wait()
        eventually(lambda: not processes(words), output)
    text = output.read_text()
    assert "stopping: a checkpoint is written first" in text and "stopped: " in text and "error" not in ours(output)
    saved = sorted(place.name for place in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved in (["000001"], ["000001", "000002"])  # on a busy machine the second step may end first
    assert launched([words[0], "--resume", *words[1:]], output=output)[0] == 0, output.read_text()
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.campaign(f"{RANKS}::test_a_rank_that_is_killed_is_named_before_torchrun_says_anything")
def test_kills_of_ranks_lose_and_double_nothing(tmp_path: Path) -> None:
    campaign(kills=1, ranks=2, seed=1, root=tmp_path)
