"""`proxima peers verify` as a user types it."""

import copy
import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
TOTALS = ("records", "matched", "differs", "failed", "unsupported")


@pytest.fixture
def records(here):
    """`records("x.json", change)` writes the first UniRL loss records, changed."""

    def write(name, change=lambda output: output):
        output = json.loads((GOLDEN / "unirl_losses.json").read_text())[:3]
        (here / name).write_text(json.dumps(change(copy.deepcopy(output))))
        return name

    return write


@pytest.mark.slow
def test_the_golden_files(proxima):
    """That every record has its verdict is in ../golden."""
    files = [GOLDEN / f"{name}.json" for name in ("trl_reward", "trl_grpo_options", "verl_agg_loss")]
    code, out, err = proxima("peers", "verify", *files, "--json")
    output = json.loads(out)
    assert (code, err) == (0, "")
    assert output["records"] == sum(len(json.loads(file.read_text())) for file in files)
    assert output["failed"] == output["unsupported"] == 0
    assert output["totals"] == {key: output[key] for key in TOTALS}
    assert sum(output[key] for key in TOTALS[1:]) == output["records"]
    assert [file["file"] for file in output["files"]] == [str(file) for file in files]
    differing = [verdict for file in output["files"] for verdict in file["verdicts"] if verdict["status"] == "differs"]
    assert differing and all(verdict["reason"] for verdict in differing)


def test_a_wrong_number_is_named(proxima, records):
    def change(golden):
        golden[1]["expected"]["loss"] += 0.25
        golden[2]["expected"]["grad_logp"][0][0] -= 0.5
        return golden

    name = records("wrong.json", change)
    code, out, err = proxima("peers", "verify", name)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[1].split()[:6] == ["wrong.json", "3", "1", "0", "2", "0"]
    assert any(line.startswith("    loss: ours ") and line.endswith("off by 0.25") for line in lines)
    assert any(line.startswith("    grad_logp[0]: ours ") and line.endswith("off by 0.5") for line in lines)
    assert sum(line.startswith("failed  unirl/") for line in lines) == 2
    code, out, _ = proxima("peers", "verify", name, "--json")
    failed = [verdict for verdict in json.loads(out)["files"][0]["verdicts"] if verdict["status"] == "failed"]
    assert code == 1 and failed[0]["differences"][0]["field"] == "loss"
    assert failed[0]["differences"][0]["difference"] == pytest.approx(0.25)


@pytest.mark.slow
def test_a_wrong_metric_is_named_and_an_unknown_one_is_not_claimed(proxima, records):
    def change(golden):
        golden[0]["expected"]["metrics"]["approx_kl"] *= 1.001
        golden[1]["expected"]["metrics"]["brand_new"] = 0.5
        return golden

    code, out, _ = proxima("peers", "verify", records("metrics.json", change), "--json")
    verdicts = json.loads(out)["files"][0]["verdicts"]
    assert code == 1 and [verdict["status"] for verdict in verdicts] == ["failed", "unsupported", "matched"]
    assert [verdict["field"] for verdict in verdicts[0]["differences"]] == ["metrics.approx_kl"]
    assert "metrics.brand_new" in verdicts[1]["reason"]


def test_another_shape_or_nan_is_a_failure_and_still_json(proxima, records):
    def change(golden):
        golden[0]["expected"]["grad_logp"] = golden[0]["expected"]["grad_logp"][:-1]
        golden[1]["expected"]["loss"] = "nan"
        return golden

    code, out, _ = proxima("peers", "verify", records("shape.json", change), "--json")
    verdicts = json.loads(out, parse_constant=lambda name: pytest.fail(name))["files"][0]["verdicts"]
    assert code == 1 and [verdict["status"] for verdict in verdicts] == ["failed", "failed", "matched"]
    assert verdicts[0]["differences"][0]["expected"].startswith("shape [")
    assert verdicts[1]["differences"][0]["difference"] == "inf"


def test_a_record_that_cannot_be_computed_fails_and_the_rest_continues(proxima, records):
    def change(golden):
        golden[0]["inputs"]["advantages"] = ["much", "more"]
        return golden

    code, out, _ = proxima("peers", "verify", records("torn.json", change), "--json")
    verdicts = json.loads(out)["files"][0]["verdicts"]
    assert code == 1 and [verdict["status"] for verdict in verdicts] == ["failed", "matched", "matched"]
    assert "ValueError" in verdicts[0]["reason"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not JSON"),
        ('{"a": 1}', "holds a dict, not a list"),
        ("[3]", "entry 0 is a int, not a record"),
        ('[{"name": "x"}]', "entry 0: golden record 'x' has no 'source'"),
        (
            '[{"name": "x", "source": "s", "dtype": "float64", "inputs": [], "params": {}, "expected": {}}]',
            "entry 0: golden record 'x': 'inputs' is a list, expected a mapping",
        ),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_files_that_hold_no_records(proxima, here, text, line):
    (here / "x.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    code, out, err = proxima("peers", "verify", "x.json")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: x.json: {line}") and len(err.splitlines()) == 1


def test_a_wrong_path_among_several_is_found_before_anything_is_computed(proxima, records, here):
    code, out, err = proxima("peers", "verify", records("x.json"), "none.json")
    assert (code, out) == (2, "") and err.startswith("error: none.json: can't be read (No such file or directory)")


@pytest.mark.slow
def test_a_folder_is_every_file_of_records_in_it(proxima, records, here):
    (here / "mine").mkdir()
    (here / "mine" / "README.md").write_text("not a record")
    records("mine/b.json"), records("mine/a.json"), records("c.json")
    code, out, _ = proxima("peers", "verify", "mine", "c.json", "--json")
    assert code == 0 and [file["file"] for file in json.loads(out)["files"]] == ["mine/a.json", "mine/b.json", "c.json"]
    (here / "empty").mkdir()
    code, out, err = proxima("peers", "verify", "empty")
    assert (code, out) == (2, "")
    assert err == "error: empty: a folder without .json files; give files of records, or a folder of them\n"


BY_HAND = {
    "name": "x",
    "source": "by hand",
    "surrogate": {"kind": "ppo_clip"},
    "inputs": {"mask": [[1, 1]], "log_prob": [[-0.5, -1]], "proximal_log_prob": [[-0.5, -1]], "advantage": [2.0]},
    "expected": {"loss": -2.0},
}
ADVANTAGE = {"name": "x", "source": "by hand", "advantage": "rloo", "expected": {"advantage": [1, -1]}}
SLOT = {"name": "x", "source": "by hand", "expected": {"loss": 0}}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            BY_HAND | {"surrogate": {"kind": "ppo_clip", "epsilon_hihg": 0.2}},
            "refused: surrogate.epsilon_hihg=0.2 (x): 'ppo_clip' has no field 'epsilon_hihg'; did you mean 'epsilon_h",
        ),
        (BY_HAND | {"surrogate": "ppo_clap"}, "refused: surrogate.kind=ppo_clap (x): no surrogate 'ppo_clap'; did you"),
        (BY_HAND | {"surrogate": {"kind": "cppo", "delta": -1}}, "refused: surrogate.delta=-1 (x): must be > 0"),
        (BY_HAND | {"surrogate": None}, "refused: golden record 'x' names no spec; add one of surrogate, "),
        (
            BY_HAND | {"expected": {"grad_logp": [[-1.0, -1.0]]}},
            "nothing of ours computes 'grad_logp' here; did you mean 'grad_log_prob'?",
        ),
        (
            BY_HAND | {"inputs": BY_HAND["inputs"] | {"advantag": [1.0]}},
            "refused: from_padded: PolicyBatch has no field 'advantag'; did you mean 'advantage'?",
        ),
        (
            BY_HAND | {"inputs": {key: value for key, value in BY_HAND["inputs"].items() if key != "advantage"}},
            "refused: PpoClip needs `advantage`, which the batch lacks: ",
        ),
        (
            ADVANTAGE | {"inputs": {"reward": [1, 0], "grup": [1, 1]}},
            "refused: inputs: Outcomes has no field 'grup'; did you mean 'group'?",
        ),
        (
            ADVANTAGE | {"advantage": "gae", "inputs": {"reward": [1, 0], "loss_mask": [1, 1], "cu_seqlens": [0, 2]}},
            "refused: Gae needs `value`: ",
        ),
        (SLOT | {"reward_kl": {}, "inputs": {"log_prob": [-1]}}, "refused: inputs: score is missing"),
        (
            SLOT | {"proximal": "next", "inputs": {"old_log_prob": [-1]}},
            "refused: inputs: there is no 'old_log_prob' here; did you mean",
        ),
        (
            SLOT | {"preference": "hinge", "inputs": {"chosen": [-1]}},
            "refused: inputs: rejected is missing; PreferencePairs documents it",
        ),
    ],
)
def test_a_mistake_in_a_record_by_hand_is_one_line(proxima, here, record, said):
    (here / "one.json").write_text(json.dumps([record]))
    code, out, err = proxima("peers", "verify", "one.json")
    line = out.splitlines()[-1]
    assert (code, err) == (0, "") and line.startswith(f"unsupported  x  (one.json): {said}"), out
    assert out.splitlines()[1].split() == ["one.json", "1", "0", "0", "0", "1"]


@pytest.mark.parametrize("source", ["by hand", "peer"])
def test_an_unknown_key_of_a_record_is_named(source, proxima, here):
    record = json.loads((GOLDEN / "verl_agg_loss.json").read_text())[0]
    if source == "by hand":
        inputs = {"loss": [[1.0, 3.0]], "mask": [[1, 1]]}
        record = {
            "name": "mean",
            "source": source,
            "aggregate": "token_mean",
            "inputs": inputs,
            "expected": {"loss": 2.0},
        }
    for extra, status in (({}, "matched"), ({"corection": {"kind": "importance"}}, "unsupported")):
        (here / "one.json").write_text(json.dumps([record | extra]))
        _, out, _ = proxima("peers", "verify", "one.json", "--json")
        (verdict,) = json.loads(out)["files"][0]["verdicts"]
        assert verdict["status"] == status, verdict
    assert verdict["reason"] == "no reading of the keys corection"
