"""Real processes over gloo: whatever a rank dies of, rank 0 says it in one line, and no process is left."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kills.ranks import campaign
from tests.runtime.placement.launched import ROOT, launched, one_by_one, ours, processes, ranked, started, until_printed

FAULTY = "tests.runtime.placement.faulty_loss:Faulty"
Tiny = Callable[..., Path]


def faulty(how: str, rank: int = 1) -> dict[str, object]:
    return {"algorithm": {"preset": "grpo", "surrogate": {"kind": FAULTY, "how": how, "rank": rank}}}


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if "error" in line.lower()]


def test_an_exception_of_one_rank_is_the_line_of_the_run(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run", **faulty("raise"))
    code, printed = launched(words, output=tmp_path / "out")
    host = os.uname().nodename
    line = f"rank 1 on {host}: MemoryError: this rank has no memory left"
    assert code == 1
    assert f"error: {line}; its traceback is in log.txt; resume with --resume\n" in printed
    assert (tmp_path / "out").read_text().count(f"error: {line}") == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert '[rank 1]     raise MemoryError("this rank has no memory left")' in log
    assert "Connection closed" not in printed


def test_a_rank_that_is_killed_is_named_before_torchrun_says_anything(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run", **faulty("kill"))
    code, _ = launched(words, output=tmp_path / "out")
    text = (tmp_path / "out").read_text()
    start = f"error: rank 1 on {os.uname().nodename} died during update of policy, update "
    assert code == 1
    assert text.count(start) == 1
    assert text.index(start) < text.index("Root Cause")
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.waits
@pytest.mark.parametrize(("how", "words"), [("stop", "has not responded for"), ("sleep", "made no progress for")])
def test_a_rank_that_hangs_is_named_and_ends_the_run(tiny_model: Tiny, tmp_path: Path, how: str, words: str) -> None:
    placement = {"placement__timeout": 8.0}
    command = ranked(tiny_model(), tmp_path / "run", **faulty(how), **placement)
    _, printed = launched(command, output=tmp_path / "out")
    name = f"rank 1 on {os.uname().nodename}"
    assert f"WARNING {name} {words}" in printed
    assert f"error: {name} {words}" in printed
    assert "longer than placement.timeout=8; if it is only slow, raise placement.timeout; resume with" in printed


def test_the_other_ranks_end_when_rank_0_is_killed(tiny_model: Tiny, tmp_path: Path) -> None:
    code, printed = launched(ranked(tiny_model(), tmp_path / "run", **faulty("kill", 0)), output=tmp_path / "out")
    assert code == 1
    assert errors(printed) == []  # quietly


def test_warnings_of_a_rank_are_in_the_log_alone(tiny_model: Tiny, tmp_path: Path) -> None:
    code, printed = launched(ranked(tiny_model(), tmp_path / "run", **faulty("warn")), output=tmp_path / "out")
    assert code == 0
    assert "a rank warns" not in printed
    assert printed.count("loading model") == 1
    assert "UserWarning: a rank warns" in (tmp_path / "run" / "log.txt").read_text()


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


def test_ranks_with_other_recipes_are_refused_before_a_model_loads(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run")
    ends = one_by_one([(words, {}), ([words[0], "seed=4", *words[1:]], {})])
    host = os.uname().nodename
    assert ends[0][:2] == (
        2,
        f"error: rank 1 on {host} differs from rank 0 on {host} in seed: 4 there, 3 here; start every rank with one "
        "command line, and one recipe\n",
    )
    assert (ends[1][0], ends[1][1], ends[1][2]) == (1, "", "")
    assert not (tmp_path / "run").exists()


def test_an_error_that_one_node_has_is_told_by_rank_0(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run")
    ends = one_by_one([(words, {}), ([str(tmp_path / "absent.yaml"), *words[1:]], {})])
    assert ends[0][0] == 2
    assert ends[0][1].startswith(f"error: rank 1 on {os.uname().nodename}: ")
    assert "absent.yaml" in ends[0][1]
    assert ends[1][1:] == ("", "")


@pytest.mark.waits
def test_a_rank_that_never_comes(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run", placement__timeout=3.0)
    [(code, error, _)] = one_by_one([(words, {"WORLD_SIZE": "3"})])
    assert code == 2
    assert error.startswith("error: ranks 1-2 of 3 did not call port ")
    assert error.endswith("within 3 s; its node has left or can't reach this one: see its own messages, then start all "
                          "ranks again\n")  # fmt: skip


def test_several_processes_of_a_local_run(tiny_model: Tiny, tmp_path: Path) -> None:
    words = [*ranked(tiny_model(), tmp_path / "run"), "placement=local"]
    [(code, error, _)] = one_by_one([(words, {"WORLD_SIZE": "2"})])
    assert code == 2
    assert error.startswith("error: placement.kind=local (command line): ")
    assert error.endswith("runs one process, but a launcher has started 2; set placement=torchrun\n")
    assert len(error.splitlines()) == 1


def test_ctrl_c_writes_a_checkpoint_and_the_resume_goes_on(tiny_model: Tiny, tmp_path: Path) -> None:
    words = ranked(tiny_model(), tmp_path / "run", train__steps=400, eval__every=0, checkpoint__every=0)
    output = tmp_path / "out"
    with started(words, output=output) as process:
        until_printed(output, "step   2/400")
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert not processes(words)
    text = output.read_text()
    assert "stopping: a checkpoint is written first" in text
    assert "stopped: " in text
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert "error" not in ours(output)


def test_the_words_find_their_processes() -> None:
    assert os.getpid() not in processes([str(ROOT / "no such word")])


def test_kills_of_ranks_lose_and_double_nothing(tmp_path: Path) -> None:
    campaign(kills=1, ranks=2, seed=1, root=tmp_path)
