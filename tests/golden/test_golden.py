"""Every golden record is matched, or differs for a reason that this folder's README names; and no number of it may be
wrong."""

import copy
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxima.peers.verify import Record, totals, verify_record

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.json"))
RECORDS = [record for file in FILES for record in json.loads(file.read_text())]
REASONS = set(re.findall(r"\b(?:[PTUA]\d+|float32)\b", (HERE / "README.md").read_text()))


@pytest.mark.parametrize("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_record(record: dict[str, Any]) -> None:
    verdict = verify_record(record)
    assert verdict.status in ("matched", "differs"), verdict.reason
    assert verdict.status == "matched" or verdict.reason in REASONS
    assert set(Record.of(record).leaves) == set(verdict.compared)  # every expected number, metrics included


def test_nearly_all_match_and_every_family_is_here() -> None:
    counts = totals([verify_record(record) for record in RECORDS])
    assert counts["records"] == len(RECORDS) >= 300 and counts["failed"] == 0
    assert counts["matched"] >= 0.9 * len(RECORDS) and counts["unsupported"] == 0
    assert len({record["source"] for record in RECORDS}) >= 50


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every single number below `value`, with the keys and indices that lead to it."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from numbers(child, (*path, key))


def altered(value: Any) -> Any:
    """A tenth of a percent off; the other one for an entry of a mask, the next for a count; some number where there was
    none."""
    if isinstance(value, bool) or value in (0, 1):
        return 1 - value
    if isinstance(value, int):
        return value + 1
    return value * 1.001 if isinstance(value, float) else 0.123


def mutants(file: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of each peer's function and each of its expected leaves, one record with one number altered; which one is drawn
    from its name."""
    by_leaf: dict[tuple[str, str], list[tuple[dict[str, Any], tuple[Any, ...]]]] = {}
    for record in json.loads(file.read_text()):
        for path, value in numbers(record["expected"]):
            if (
                not isinstance(value, float) or value == 0 or abs(value) > 1e-5
            ):  # what lies below is rounding in some peers
                leaf = ".".join(key for key in path if isinstance(key, str))
                by_leaf.setdefault((record["source"], leaf), []).append((record, path))
    for (source, leaf), places in by_leaf.items():
        record, path = places[zlib.crc32(f"{source} {leaf}".encode()) % len(places)]
        wrong = copy.deepcopy(record)
        holder = wrong["expected"]
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = altered(holder[path[-1]])
        yield record["name"], leaf, wrong


LONG = {"verl070_rollout_correction", "verl_rollout_correction"}  # verl_pr3694_rollout_is has the same functions


@pytest.mark.parametrize(
    "file", [pytest.param(f, id=f.stem, marks=[pytest.mark.slow] if f.stem in LONG else []) for f in FILES]
)
def test_any_wrong_number_fails(file: Path) -> None:
    """Verdicts come from the numbers: no function of a peer has an expected number that could be wrong unnoticed."""
    made = list(mutants(file))
    unnoticed = [(name, leaf) for name, leaf, wrong in made if verify_record(wrong).status != "failed"]
    assert made and unnoticed == []


def test_a_number_that_nobody_reads_is_unsupported() -> None:
    record = copy.deepcopy(next(r for r in RECORDS if r["source"].endswith("compute_policy_loss_vanilla")))
    record["expected"]["metrics"]["actor/brand_new"] = 0.5
    verdict = verify_record(record)
    assert verdict.status == "unsupported" and "metrics.actor/brand_new" in str(verdict.reason)
    record["expected"]["metrics"] = {**record["expected"]["metrics"], "actor/lr": 1e-6}
    del record["expected"]["metrics"]["actor/brand_new"]
    assert verify_record(record).status == "matched"  # bookkeeping is beside the point


def test_what_we_cannot_read_is_unsupported() -> None:
    alien = {**RECORDS[0], "source": "somebody 1.0 else.loss", "name": "x"}
    assert verify_record(alien).status == "unsupported" and "no adapter" in str(verify_record(alien).reason)
    strange = copy.deepcopy(next(r for r in RECORDS if r["source"].endswith("compute_policy_loss_vanilla")))
    strange["params"]["loss_agg_mode"] = "median"
    assert verify_record(strange).status == "unsupported"
    with pytest.raises(ValueError, match="has no 'params'"):
        verify_record({"name": "y", "source": "", "dtype": "", "inputs": {}})


def test_reasons_in_use() -> None:
    used = Counter(v.reason for v in map(verify_record, RECORDS) if v.status == "differs")
    assert {"P6", "P10", "P25", "P27", "P35", "T1", "A3", "A5", "A7"} <= set(used)


def by_hand(**changes: Any) -> dict[str, Any]:
    """-A r at ratio 1 and advantage 2, by hand: no adapter reads it."""
    inputs = {"mask": [[1, 1]], "log_prob": [[-0.5, -1.0]], "proximal_log_prob": [[-0.5, -1.0]], "advantage": [2.0]}
    expected = {"loss": -2.0, "grad_log_prob": [[-1.0, -1.0]], "keep": [[1, 1]], "metrics": {"ratio_mean": 1.0}}
    record = {"name": "ratio_one", "source": "by hand", "surrogate": {"kind": "ppo_clip"}, "inputs": inputs}
    return {**record, "expected": expected, **changes}


def test_a_record_by_hand_names_the_spec() -> None:
    assert verify_record(by_hand()).status == "matched"
    assert verify_record(by_hand(source="hand", surrogate="ppo_clip", aggregate="token_sum")).status == "failed"
    wrong = verify_record(by_hand(expected={"loss": -2.1}))
    assert wrong.status == "failed" and wrong.differences[0].ours == -2.0
    assert verify_record(by_hand(expected={"loss": -2.0, "lozz": 1})).status == "unsupported"
    with pytest.raises(ValueError, match="names no spec"):
        verify_record({key: value for key, value in by_hand().items() if key != "surrogate"})
    with pytest.raises(ValueError, match="did you mean 'ppo_clip'"):
        verify_record(by_hand(surrogate="ppo_clap"))


@pytest.mark.parametrize(
    ("specs", "inputs", "expected"),
    [
        (
            {"correction": {"kind": "importance", "upper": 1.5}},
            {
                "mask": [[1, 1]],
                "log_prob": [[-1, -1]],
                "proximal_log_prob": [[-1, -1]],
                "behavior_log_prob": [[-1, -3]],
            },
            {"weight": [[1.0, 1.5]], "keep": [[1, 1]]},
        ),
        (
            {"penalty": {"kind": "k2", "coefficient": 0.5}},
            {"mask": [[1, 0]], "log_prob": [[-1, "nan"]], "reference_log_prob": [[-3, 0]]},
            {"penalty": [[1.0, 0.0]], "loss": 1.0, "grad_log_prob": [[1.0, 0.0]]},
        ),
        (
            {"aggregate": {"kind": "sequence_mean_token_mean"}},
            {"loss_mask": [1, 1, 1], "cu_seqlens": [0, 2, 3], "loss": [1.0, 3.0, 4.0]},
            {"loss": 3.0, "denominator": 2.0, "grad_loss": [0.25, 0.25, 0.5]},
        ),
        ({"advantage": "rloo"}, {"reward": [1, 0, 0], "group": [7, 7, 7]}, {"advantage": [1.0, -0.5, -0.5]}),
        (
            {"advantage": {"kind": "gae", "gamma": 0.5, "lam": 1.0, "whiten": False}},
            {"reward": [0, 1], "value": [0.25, 0.5], "loss_mask": [1, 1], "cu_seqlens": [0, 2]},
            {"advantage": [0.25, 0.5]},
        ),
    ],
)
def test_every_slot_by_hand(specs: dict[str, Any], inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    verdict = verify_record({"name": "x", "source": "by hand", **specs, "inputs": inputs, "expected": expected})
    assert (verdict.status, set(verdict.compared)) == ("matched", set(expected)), verdict
