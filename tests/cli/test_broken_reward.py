"""A reward that fails on everything: before the run, during it, and once its file is repaired."""

import re
import threading

import pytest
import yaml

from proxima.cli.main import main
from proxima.rollout import reward_checks
from proxima.rollout.reward_checks import PLAIN
from tests.cli.test_run import steps
from tests.runtime.tiny_run import recipe

pytestmark = pytest.mark.usefixtures("lent_servers")
RAISES = "def mine(completion: str, answer):\n    return {'1': 1.0}[completion + 'x']\n"
TRIAL_ALONE = f"""
def mine(completion: str, answer):
    if completion in (answer, {PLAIN!r}):
        return 0.0
    raise RuntimeError("no opinion")
"""
DIFFERS = "return float(len(set(completion)))\n"
REPAIRED = f"def mine(completion: str):\n    {DIFFERS}"


@pytest.fixture
def command(tiny_model, tmp_path, capsys):
    """`command(SOURCE, *words, **changes)` → exit code and standard error of `proxima train` with that reward file."""

    def run(source, *words, **changes):
        (tmp_path / "mine.py").write_text(source)
        tree = recipe(tiny_model("llama"), **{"train__steps": 3, "folder": str(tmp_path / "run")} | changes)
        tree["reward"] = {"kind": "function", "path": f"{tmp_path}/mine.py:mine"} | tree.pop("fields", {})
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        code = main(["train", str(tmp_path / "recipe.yaml"), "--quiet", *words])
        return code, capsys.readouterr().err

    return run


def test_a_ctrl_c_waits_for_no_reward_that_is_tried(monkeypatch):
    hangs = threading.Event()

    async def tried():
        hangs.wait()

    def interrupted(future, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reward_checks.Future, "result", interrupted)
        reward_checks._in_thread(tried())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "reward-trial"]
    assert thread.daemon and thread.is_alive()
    hangs.set()
    thread.join()


@pytest.mark.slow
def test_a_reward_that_always_raises_is_refused_before_weights_are_loaded(command, tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.model.model_source.load", None)
    code, error = command(RAISES)
    assert code == 2 and error.count("\n") == 1 and not (tmp_path / "run").exists()
    assert error.startswith("error: reward='mine' fails: none of 8 synthetic completions such as '")
    assert "has a score (mine: KeyError: '" in error and "(mine.py:2)" in error
    assert error.endswith(
        "fix the reward (proxima reward score tries it), "
        "or set runtime.reward_trial=warn if it is right to refuse such texts\n"
    )


@pytest.mark.slow
def test_a_reward_that_hangs_is_refused_with_its_timeout(command):
    code, error = command("import time\ndef mine(completion: str):\n    time.sleep(60)\n", runtime__reward_timeout=0.05)
    assert code == 2 and "(mine: timed out after 0.05 s)" in error


@pytest.mark.slow
def test_a_run_without_scores_ends_and_resumes_with_the_repaired_file(command, tmp_path):
    code, error = command(TRIAL_ALONE, runtime__max_unscored_steps=2)
    assert code == 1 and steps(tmp_path / "run") == [1, 2]
    assert "no completion of the last 2 steps has a score (mine: RuntimeError: no opinion (mine.py:5))" in error
    assert "--resume, with --accept-changes where its file or fields have changed" in error
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 1: no completion has a score (mine: RuntimeError: no opinion (mine.py:5))" in log
    assert "The run ends after 2 such steps in a row (runtime.max_unscored_steps)" in log

    code, error = command(REPAIRED, "--resume", runtime__max_unscored_steps=2)
    assert code == 2 and "reward.0: mine.py: changed since the run" in error and "--accept-changes" in error

    code, error = command(REPAIRED, "--resume", "--accept-changes", runtime__max_unscored_steps=2)
    assert code == 0 and steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:coroutine:RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lag", [{}, {"runtime__max_concurrent_rollouts": 4}])
def test_dynamic_sampling_without_scores_ends_early_and_blames_the_reward(command, tmp_path, lag):
    refill = {"algorithm": {"preset": "dapo"}, "runtime__max_unscored_steps": 2, **lag}
    code, error = command(TRIAL_ALONE, **refill)
    assert code == 1 and re.search(
        "step 1: [2-9] generation batches", error
    )  # asynchronous: 2, or as many as are ready
    assert "mine: RuntimeError: no opinion" in error
    assert "Fix the reward and resume (--resume, with --accept-changes" in error and "easier" not in error
    code, error = command(REPAIRED, "--resume", "--accept-changes", **refill)
    assert code == 0 and steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.slow
def test_a_reward_that_refuses_made_up_texts_rightly_is_let_through(command, tmp_path):
    source = f"def mine(completion: str, answer):\n    assert completion not in (answer, {PLAIN!r})\n    {DIFFERS}"
    assert command(source)[0] == 2
    code, _ = command(source, runtime__reward_trial="warn", train__steps=1)
    assert code == 0 and "none of 8 synthetic completions such as" in (tmp_path / "run" / "log.txt").read_text()
    code, _ = command(source, "--overwrite", runtime__reward_trial="off", train__steps=1)
    assert code == 0 and "synthetic" not in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_a_reward_that_fails_on_one_of_the_texts_alone_is_fine(command):
    source = f"def mine(completion: str, answer):\n    assert completion != answer\n    {DIFFERS}"
    assert command(source, train__steps=1)[0] == 0


@pytest.mark.slow
def test_a_reward_that_compares_groups_is_tried_on_several(command):
    """One group has no deviation, so the first prompt gets no score."""
    spread = "statistics.stdev(len(group.completions[0].text) for group in groups)"
    source = (
        "import statistics\ndef mine(groups):\n"
        f"    return [[i + {spread} for i in range(len(group.completions))] for group in groups]\n"
    )
    assert command(source, train__steps=1, fields={"kind": "function_batch"})[0] == 0
