"""What is exported is the same model for an older transformers, which PROXIMA_OLD_TRANSFORMERS names."""

import os
from pathlib import Path

import pytest

from scripts import family_exports, family_sweep

LARGEST = 1e-5  # nats
ADDED = {  # the older names of fields that the input had under the newer ones alone
    *("global_rope_theta", "local_rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rope_scaling"),
    *("layer_types", "num_experts", "rope_theta", "rotary_emb_base", "rotary_pct", "time_step_limit", "torch_dtype"),
}


@pytest.mark.campaign("tests/model/test_written_folders.py::test_the_older_names_of_positions_say_the_same")
@pytest.mark.skipif(family_exports.OLD not in os.environ, reason="needs a folder with an older transformers")
def test_exports_of_every_type_are_read_by_an_older_transformers():
    old = Path(os.environ[family_exports.OLD])
    rows = list(family_exports.swept(list(family_sweep.classes()), old))
    read = [row for row in rows if "nats" in row]
    assert len(read) >= 60
    assert not [row for row in read if set(row["changed"]) - ADDED]
    wrong = {row["name"] for row in rows if "error" in row or row.get("nats", 0) > LARGEST}
    assert wrong <= family_exports.DIFFERENT.keys()
