"""Every golden record, of a peer or worked out by hand, is matched, or differs for a reason that the README names; and
no number of it may be wrong."""

import copy
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxima.core.loss import Corrected, TokenLoss
from proxima_peers.verify.record import Record
from proxima_peers.verify.verification import verify_record

from ..verified_records import FILES, Verified, owner_of_call

HERE = Path(__file__).parent
RECORDS = [record for file in FILES if file.parent == HERE for record in json.loads(file.read_text())]
REASONS = set(re.findall(r"\b[PTUA]\d+\b", (HERE / "README.md").read_text()))
# The records that differ on purpose, and why; all others match.
DIFFERS = {
    name: reason
    for reason, name in (line.split(maxsplit=1) for line in (HERE / "differs.txt").read_text().splitlines())
}


def test_every_record_has_its_verdict(golden: dict[str, Verified]) -> None:
    assert len(golden) > len(RECORDS) >= 300 and len({record["source"] for record in RECORDS}) >= 50
    found = {name: (entry.verdict.status, entry.verdict.reason) for name, entry in golden.items()}
    differing = {name: ("differs", reason.replace("+", ", ")) for name, reason in DIFFERS.items()}
    assert found == dict.fromkeys(found, ("matched", None)) | differing
    assert {reason for reasons in DIFFERS.values() for reason in reasons.split("+")} <= REASONS
    for name, entry in golden.items():  # every expected number, metrics included
        assert set(Record.of(entry.record).leaves) == set(entry.verdict.compared), name


def first_of_each_source() -> list[dict[str, Any]]:
    """A record of each function of a peer, the one with most options."""
    by_name: dict[str, dict[str, Any]] = {}
    for record in sorted(RECORDS, key=lambda entry: -len(str(entry["params"]))):
        by_name.setdefault(record["source"], record)
    return list(by_name.values())


def copied(params: dict[str, Any]) -> dict[str, Any]:
    """The options and those inside of others, but not the numbers."""
    return {name: copied(value) if isinstance(value, dict) else value for name, value in params.items()}


def sections(params: dict[str, Any], path: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The options, and those inside of others, with the path before a name in them."""
    yield params, path
    for key, value in params.items():
        if isinstance(value, dict):
            yield from sections(value, f"{path}{key}.")


@pytest.mark.parametrize("record", first_of_each_source(), ids=lambda record: record["name"])
def test_an_option_that_nobody_reads_is_unsupported(record: dict[str, Any]) -> None:
    for _, path in list(sections(record["params"])):
        changed = copied(record)
        next(section for section, where in sections(changed["params"]) if where == path)["brand_new"] = 0.5
        verdict = verify_record(changed)
        assert verdict.status == "unsupported" and f"{path}brand_new" in str(verdict.reason)


def absent(source: str) -> dict[str, Any]:
    """What a peer's function takes where an option is absent, of those whose absence changes a verdict below."""
    by_name = {}
    for line in (HERE / "absent.txt").read_text().splitlines():
        words, _, options = line.partition(": ")
        if all(word in source for word in words.split()):
            by_name |= {name: json.loads(value) for name, value in (option.split("=") for option in options.split())}
    return by_name


# Inputs that a peer does without.
OPTIONAL = {"behavior_logp", "sampling_logp", "importance_sampling_ratio", "tool_mask", "margin", "rollout_is_weights"}
OPTIONAL |= {"loss_mask", "group_indices", "num_items_in_batch", "mask", "is_weights", "kl_logps"}


def without(record: dict[str, Any], part: str, path: str, name: str, **instead: Any) -> dict[str, Any]:
    """The record without an option or input, or with another value of it."""
    changed = copied(record)
    section = next(section for section, where in sections(changed[part]) if where == path)
    del section[name]
    section |= instead
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("record", first_of_each_source(), ids=lambda record: record["name"])
def test_an_absent_option_or_input_is_the_default_or_unsupported(record: dict[str, Any]) -> None:
    def outcome(changed: dict[str, Any]) -> Any:
        verdict = verify_record(changed)
        return (
            verdict.status,
            verdict.reason,
            [(entry.field, entry.at, str(entry.ours)) for entry in verdict.differences],
        )

    whole = outcome(record)
    defaults = absent(record["source"])
    for section, path in sections(record["params"]):
        for name in section:
            result = outcome(without(record, "params", path, name))
            if result != whole and result[0] != "unsupported":
                assert path + name in defaults, (record["name"], path + name, result)
                given = without(record, "params", path, name, **{name: defaults[path + name]})
                assert outcome(given) == result, (record["name"], path + name)
    for name in record["inputs"]:
        result = outcome(without(record, "inputs", "", name))
        assert result[0] == "unsupported" or name in OPTIONAL, (record["name"], name, result)


# Whitening undoes a factor; of these records a rejection or weight gives metrics alone; verl asks for an aggregation
# that it then ignores (P6, P10), or has nothing to aggregate (P1).
UNMOVED: dict[str, tuple[str, ...]] = {
    "Grpo": ("verl/advantage/gdpo", "trl/advantages/normalize_then_sum"),
    "Rloo": ("areal/normalization/",),
    "Importance": ("verl070/rs_", "verl/policy_loss/bypass_mode", "verl/rollout_corr/", "verl_pr3694", "areal/"),
    "Rejection": ("verl070/", "verl/rollout_corr/", "areal/"),
    "SequenceMeanTokenSum": ("verl/policy_loss/sapo/", "verl/policy_loss/geo_mean/", "verl/policy_loss/bypass_mode/"),
    "TokenMean": ("verl/policy_loss/sapo/", "verl/policy_loss/geo_mean/"),
}


def scaled(result: Any) -> Any:
    """What a spec returns, 1 % too large."""
    if isinstance(result, TokenLoss):
        return replace(result, loss=result.loss * 1.01)
    if isinstance(result, Corrected):
        return replace(result, weight=result.weight * 1.01)
    return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


@pytest.mark.slow
def test_a_spec_that_is_a_percent_off_fails_its_records(
    golden: dict[str, Verified], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No peculiarity excuses it: whatever a record may differ in is computed from our spec. Of each spec, a record of
    each source and set of options."""
    records: dict[type, dict[Any, dict[str, Any]]] = {}
    for entry in (entry for entry in golden.values() if "params" in entry.record):  # those of peers
        for cls in entry.called:
            of_spec = records.setdefault(cls, {})
            of_spec.setdefault((entry.record["source"], tuple(sorted(entry.record["params"]))), entry.record)
    unnoticed = []
    for cls, of_spec in records.items():
        owner = owner_of_call(cls)

        def wrong(self: Any, *args: Any, _own: Any = owner.__dict__["__call__"], _cls: type = cls) -> Any:
            result = _own(self, *args)
            return scaled(result) if type(self) is _cls else result

        with monkeypatch.context() as patch:
            patch.setattr(owner, "__call__", wrong)
            passed = [record["name"] for record in of_spec.values() if verify_record(record).status != "failed"]
        expected = UNMOVED.get(cls.__name__, ("-",))
        unnoticed += [(cls.__name__, name) for name in passed if not name.removeprefix("made/").startswith(expected)]
    assert unnoticed == [] and len(records) >= 45


# What a peer computes from float32, or as a sum of terms of either sign: there 1e-6 is too little
# to tell.
ROUNDED = r"grpo_vectorized|gdpo|gpg|opo_out|prox_logp|_std$|chi2|k3_|(ppo_actor_loss_fn|geo_mean) loss$"


def change(record: dict[str, Any], leaf: str, number: Any) -> float:
    """How much a number is altered, relatively."""
    if record["source"] == "by hand":
        return 1e-3
    rounded = record["dtype"].startswith("float32") or re.search(ROUNDED, f"{record['source']} {leaf}")
    small = isinstance(number, float) and abs(number) < 0.01
    return 1e-3 if rounded or small else 1e-6


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every single number below `value`, with the keys and indices that lead to it."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from numbers(child, (*path, key))


def undefined(record: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """A position [row, column, …] outside the mask, where peers leave what they like."""
    mask = record["inputs"].get("mask") or record["expected"].get("loss_mask")
    at = [index for index in path if isinstance(index, int)][:2]
    if mask is None or len(at) < 2 or len(mask[0]) <= at[1]:
        return False
    return not mask[at[0]][at[1]]


def altered(value: Any, *, by: float) -> Any:
    """Relatively `by` off; the other one for an entry of a mask, the next for a count; some number where there was
    none."""
    if isinstance(value, bool) or value in (0, 1):
        return 1 - value
    if isinstance(value, int):
        return value + 1
    return value * (1 + by) if isinstance(value, float) else 0.123


def drawn(records: list[dict[str, Any]]) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Of each source and each of its expected leaves, the place of a number in one record, drawn from the names: name
    of the record → leaf → place."""
    by_leaf: dict[tuple[str, str], list[tuple[str, tuple[Any, ...]]]] = {}
    for record in records:
        for path, number in numbers(record["expected"]):
            if not undefined(record, path) and not (isinstance(number, float) and 0 < abs(number) <= 1e-5):  # rounding
                leaf = ".".join(key for key in path if isinstance(key, str))
                by_leaf.setdefault((record["source"], leaf), []).append((record["name"], path))
    chosen: dict[str, dict[str, tuple[Any, ...]]] = {}
    for (source, leaf), places in by_leaf.items():
        name, path = places[zlib.crc32(f"{source} {leaf}".encode()) % len(places)]
        chosen.setdefault(name, {})[leaf] = path
    return chosen


def with_wrong(record: dict[str, Any], wrong: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The record with the number at each of these places altered."""
    result = record | {"expected": copy.deepcopy(record["expected"])}
    for leaf, path in wrong.items():
        holder = result["expected"]
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = altered(holder[path[-1]], by=change(record, leaf, holder[path[-1]]))
    return result


def unnoticed(record: dict[str, Any], wrong: dict[str, tuple[Any, ...]]) -> list[str]:
    """The leaves with a wrong number that leave the verdict as it is. One evaluation shows it of all of them: where the
    reading with the fewest wrong leaves has all of these wrong, none has but one of them right."""
    verdict = verify_record(with_wrong(record, wrong))
    if verdict.status == "failed" and {difference.field for difference in verdict.differences} >= set(wrong):
        return []
    alone = {leaf: verify_record(with_wrong(record, {leaf: path})) for leaf, path in wrong.items()}
    return [leaf for leaf, verdict in alone.items() if verdict.status != "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_any_wrong_number_fails(file: Path) -> None:
    """Verdicts come from the numbers: no function of a peer has an expected number that could be wrong unnoticed."""
    records = {record["name"]: record for record in json.loads(file.read_text())}
    chosen = drawn(list(records.values()))
    passed = [(name, leaf) for name, wrong in chosen.items() for leaf in unnoticed(records[name], wrong)]
    assert chosen and passed == []


def test_bookkeeping_is_beside_the_point() -> None:
    record = copy.deepcopy(next(r for r in RECORDS if r["source"].endswith("compute_policy_loss_vanilla")))
    record["expected"]["metrics"]["actor/lr"] = 1e-6
    assert verify_record(record).status == "matched"


def test_what_we_cannot_read_is_unsupported() -> None:
    alien = {**RECORDS[0], "source": "somebody 1.0 else.loss", "name": "x"}
    assert verify_record(alien).status == "unsupported" and "no adapter" in str(verify_record(alien).reason)
    strange = copy.deepcopy(next(r for r in RECORDS if r["source"].endswith("compute_policy_loss_vanilla")))
    strange["params"]["loss_agg_mode"] = "median"
    assert verify_record(strange).status == "unsupported"
    with pytest.raises(ValueError, match="has no 'params'"):
        verify_record({"name": "y", "source": "", "dtype": "", "inputs": {}})


def test_a_clip_schedule_needs_the_progress_of_the_run() -> None:
    """UniRL gives it beside the batch; a record may have it there or among the options."""
    record = copy.deepcopy(next(r for r in RECORDS if r["name"] == "made/unirl/GRPO/linear_decay"))
    record["inputs"]["training_progress"] = record["params"].pop("training_progress")
    assert verify_record(record).status == "matched"
    record["inputs"]["training_progress"] *= 0.5
    assert verify_record(record).status == "failed"
    del record["inputs"]["training_progress"]
    verdict = verify_record(record)
    assert verdict.status == "unsupported" and "without a training_progress" in str(verdict.reason)
