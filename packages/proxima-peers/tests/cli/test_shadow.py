"""`proxima peers shadow` as a user types it."""

import json
from pathlib import Path

import numpy as np
import pytest

DUMPS = Path(__file__).parents[1] / "shadow" / "dumps"
PAGE = Path(__file__).parents[2] / "docs" / "shadow.md"


@pytest.mark.slow
def test_a_step_that_is_explained(proxima):
    code, out, err = proxima("peers", "shadow", DUMPS / "verl_token_mean_local.npz")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("one update step of verl 0.9.1, 8 answers, 50 tokens in the loss")
    assert [line.split()[0] for line in lines[3:10]] == [
        *("advantages", "weights", "mask", "loss", "metric", "gradient", "gradient")
    ]
    assert "first disagreement: loss" in lines
    assert "    over: a micro-batch, then the mean of the micro-batches" in lines
    assert any(line.startswith("loss: 2 conventions give it, which this batch can't tell apart;") for line in lines)


@pytest.mark.slow
def test_a_bug_has_no_convention_and_exit_code_1(proxima):
    code, out, err = proxima("peers", "shadow", DUMPS / "bug_mask.npz")
    assert (code, err) == (1, "")
    assert "loss: no convention gives this; 3,402 tried" in out
    code, out, _ = proxima("peers", "shadow", DUMPS / "bug_mask.npz", "--json")
    report = json.loads(out)
    assert (code, report["first_disagreement"]) == (1, "loss")
    (loss,) = [stage for stage in report["stages"] if stage["name"] == "loss"]
    assert (loss["verdict"], loss["matches"], loss["tried"]) == ("unexplained", 0, 3402)


@pytest.mark.slow
def test_every_convention_is_in_the_json(proxima):
    code, out, _ = proxima("peers", "shadow", DUMPS / "trl_dr_grpo.npz", "--json")
    (loss,) = [stage for stage in json.loads(out)["stages"] if stage["name"] == "loss"]
    assert code == 0
    assert len(loss["conventions"]) == loss["matches"] > 10
    assert len({json.dumps(match["convention"]) for match in loss["conventions"]}) == loss["matches"]
    sizes = [len(match["departures"]) for match in loss["conventions"]]
    assert sizes == sorted(sizes)


def test_the_norm_of_the_parameters_is_never_judged(proxima, here):
    arrays = {"mask": np.ones((1, 2)), "log_prob": np.full((1, 2), -0.5), "grad_norm": np.array(3.0)}
    np.savez(here / "step.npz", **arrays)
    code, out, _ = proxima("peers", "shadow", "step.npz")
    assert code == 0
    assert "gradient norm: not recomputed: the parameters' gradient needs the model" in out
    assert "explained" not in out


def test_a_damaged_file_is_one_line_and_exit_code_2(proxima, here):
    (here / "step.npz").write_bytes(b"PK\x03\x04 no more")
    code, out, err = proxima("peers", "shadow", "step.npz")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "step.npz" in err


def test_help_lists_it(proxima):
    code, out, _ = proxima("peers", "--help")
    assert code == 0
    assert "shadow" in out and "compute here what another trainer computed in one update step" in " ".join(out.split())


@pytest.mark.slow
def test_the_page_has_what_the_command_prints(proxima):
    code, out, _ = proxima("peers", "shadow", DUMPS / "verl_low_var_kl.npz")
    assert code == 0
    printed = "\n".join(f"    {line}" if line else "" for line in out.splitlines()[1:])
    assert printed in PAGE.read_text()
