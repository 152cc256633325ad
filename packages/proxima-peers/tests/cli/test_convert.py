"""`proxima peers convert` as a user types it."""

from pathlib import Path

import pytest

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima_peers.convert import PEERS

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_to_a_file(proxima, here):
    code, out, err = proxima("peers", "convert", EXAMPLES / "trl_grpo.py", "--from", "trl", "--out", "recipe.yaml")
    assert (code, out) == (0, "wrote recipe.yaml\n")
    with pytest.raises(ConfigError, match=r"^reward\.0\.kind .*must be filled in: my_lab.check_answer: "):
        resolve("recipe.yaml")
    filled = resolve("recipe.yaml", ["reward.0.kind=math"]).config
    assert filled.algorithm.surrogate.epsilon_high == 4.0
    lines = err.splitlines()
    assert "not supported yet:" in lines and "unknown option:" in lines and "ignored, no effect here:" in lines
    assert "  epsilon_hihg: did you mean 'epsilon_high'?" in lines


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["none.yaml", "--from", "verl"], "none.yaml: can't be read (No such file or directory); give a YAML"),
        (["none.yaml", "--from", "vrel"], "argument --from: invalid choice: 'vrel'"),
        (
            ["a.yaml", "--from", "verl", "--out", "no/such/recipe.yaml"],
            "--out=no/such/recipe.yaml (command line): its folder does not exist; make it, or give another path\n",
        ),
        (
            ["a.yaml", "--from", "verl", "--out", "a.yaml"],
            "--out=a.yaml (command line): is the input file; give another path\n",
        ),
        (["a.yaml", "--from", "trl"], "a.yaml: is not such a configuration of TRL: "),
        (
            ["b.yaml"],
            "b.yaml: has the options of none of areal, prime_rl, skyrl, trl, unirl, verl; "
            "name the framework with --from\n",
        ),
    ],
)
def test_mistakes_are_one_line(proxima, here, words, line):
    text = "actor_rollout_ref: {rollout: {n: 5}}\ntrainer: {total_epochs: 1}\n"
    (here / "a.yaml").write_text(text)
    (here / "b.yaml").write_text("colour: red\n")
    code, out, err = proxima("peers", "convert", *words)
    assert (code, out) == (2, "") and err.startswith(f"error: {line}") and len(err.splitlines()) == 1
    assert (here / "a.yaml").read_text() == text
    if "not such a configuration" in line:
        assert err.endswith("; it looks like one of verl: --from verl\n")


def test_to_standard_output_alone(proxima, here):
    code, out, err = proxima("peers", "convert", EXAMPLES / "unirl_cppo.yaml", "--from", "unirl")
    (here / "recipe.yaml").write_text(out)
    assert code == 0 and resolve("recipe.yaml").config.algorithm.surrogate.delta == 0.15
    assert "eval_interval" in err


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_the_framework_is_recognised(peer, proxima, here):
    for file in sorted(path for path in EXAMPLES.iterdir() if path.name.startswith(f"{peer}_")):
        code, out, err = proxima("peers", "convert", file)
        assert code == 0 and f"--from {peer}`: each value" in out, file
        assert err.startswith(f"read as a configuration of {peer}; --from names another framework\n")
