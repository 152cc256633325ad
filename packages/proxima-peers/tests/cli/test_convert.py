"""`proxima peers convert` as a user types it."""

from pathlib import Path

import pytest

from proxima.config import resolve
from proxima_peers.convert import PEERS

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_to_a_file(proxima, here):
    code, out, err = proxima("peers", "convert", EXAMPLES / "trl_grpo.py", "--from", "trl", "--out", "recipe.yaml")
    assert (code, out) == (0, "wrote recipe.yaml\n")
    assert resolve("recipe.yaml").config.algorithm.surrogate.epsilon_high == 4.0
    lines = err.splitlines()
    assert "not supported yet:" in lines and "unknown option:" in lines and "ignored, no effect here:" in lines
    assert "  epsilon_hihg: did you mean 'epsilon_high'?" in lines


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("deepspeed", "zero3.json", "its own file may set optimizer, clipping and precision"),
        ("resume_from_checkpoint", "runs/a", "weights and optimizer of another checkpoint"),
        ("auto_find_batch_size", "true", "smaller batches where memory runs out"),
        ("mixed_precision", "fp16", "float16; use bfloat16 or float32"),
    ],
)
def test_an_option_that_may_change_numbers_is_not_called_without_effect(option, value, reason, proxima, here):
    (here / "a.yaml").write_text(f"num_generations: 8\nbeta: 0.0\nmax_steps: 3\n{option}: {value}\n")
    _, _, err = proxima("peers", "convert", "a.yaml", "--from", "trl", "--out", "r.yaml")
    (line,) = (line for line in err.splitlines() if option in line)
    named = err.split("ignored, no effect here:")[0]
    assert line in named and reason in line


def test_to_standard_output_alone(proxima, here):
    code, out, err = proxima("peers", "convert", EXAMPLES / "unirl_cppo.yaml", "--from", "unirl")
    (here / "recipe.yaml").write_text(out)
    assert code == 0 and resolve("recipe.yaml").config.algorithm.surrogate.delta == 0.15
    assert "eval_interval" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["none.yaml", "--from", "verl"], "error: none.yaml: can't be read (No such file or directory); give a YAML"),
        (["none.yaml", "--from", "vrel"], "error: argument --from: invalid choice: 'vrel'"),
        ([".", "--from", "verl"], "error: .: can't be read (Is a directory)"),
    ],
)
def test_mistakes_are_one_line(proxima, here, words, line):
    code, out, err = proxima("peers", "convert", *words)
    assert (code, out) == (2, "") and err.startswith(line) and len(err.splitlines()) == 1


def test_a_folder_that_is_not_there(proxima, here):
    (here / "a.yaml").write_text("beta: 0.1\n")
    code, _, err = proxima("peers", "convert", "a.yaml", "--from", "trl", "--out", "no/such/recipe.yaml")
    assert (
        code == 2
        and err
        == "error: --out=no/such/recipe.yaml (command line): its folder does not exist; make it, or give another path\n"
    )


def test_the_file_itself_is_not_overwritten(proxima, here):
    (here / "a.yaml").write_text("beta: 0.1\n")
    code, _, err = proxima("peers", "convert", "a.yaml", "--from", "trl", "--out", "a.yaml")
    assert code == 2 and "is the input file" in err and (here / "a.yaml").read_text() == "beta: 0.1\n"


@pytest.mark.parametrize("peer", PEERS)
def test_the_framework_is_recognised(peer, proxima, here):
    for file in sorted(path for path in EXAMPLES.iterdir() if path.name.startswith(f"{peer}_")):
        code, out, err = proxima("peers", "convert", file)
        assert code == 0 and f"--from {peer}`: each value" in out, file
        assert err.startswith(f"read as a configuration of {peer}; --from names another framework\n")


def test_a_file_of_another_framework_says_whose(proxima, here):
    (here / "a.yaml").write_text("actor_rollout_ref: {rollout: {n: 5}}\ntrainer: {total_epochs: 1}\n")
    _, _, err = proxima("peers", "convert", "a.yaml", "--from", "trl")
    assert "is not such a configuration of TRL" in err and err.endswith("; it looks like one of verl: --from verl\n")
    (here / "b.yaml").write_text("colour: red\n")
    code, _, err = proxima("peers", "convert", "b.yaml")
    assert code == 2 and err == (
        "error: b.yaml: has the options of none of areal, prime_rl, trl, unirl, verl; name the framework with --from\n"
    )
