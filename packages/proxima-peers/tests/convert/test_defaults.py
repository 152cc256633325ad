"""A default of a peer is mapped to a field, or the recipe says what it means; the table is defaults.yaml."""

import re
from pathlib import Path

import pytest
import yaml

from proxima.config.resolution import resolve

from .test_options import value_at

TABLE = yaml.load(Path(__file__).with_name("defaults.yaml").read_text(), yaml.CSafeLoader)
CASES = [
    (case["peer"], case["base"], option, case["defaults"][option]) for case in TABLE for option in case["defaults"]
]


@pytest.mark.parametrize(("peer", "base", "option", "row"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_a_default_that_is_not_in_the_file_is_mapped_or_named(converted, peer, base, option, row):
    done = converted(peer, base)
    places = {place: value for place, value in row.items() if place not in ("value", "named")}
    assert option not in base and (places or row.get("named"))
    resolved = resolve(done.filled, root=None, import_code=False)
    assert {place: value_at(resolved, place) for place in places} == places
    words = {word.strip(".,:;") for word in re.findall(r"[^\s()'=]+", done.text.replace("#", " "))}
    assert not row.get("named") or option in words


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["peer"])
def test_a_default_that_is_written_out_changes_nothing(converted, case):
    """The values of the table are those that the converter assumes."""
    plain = {name: row["value"] for name, row in case["defaults"].items() if row["value"] is not None}
    skipped = ("enable_segment_wise_ppo", "rollout.consumer_batch_size", "bf16", "orchestrator.post_batch_filters")
    written = {name: value for name, value in plain.items() if name not in skipped}
    before, after = (converted(case["peer"], case["base"] | more) for more in ({}, written))
    config = resolve(before.filled, root=None, import_code=False).config
    assert resolve(after.filled, root=None, import_code=False).config == config
