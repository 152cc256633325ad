"""What is exported is the same model for an older transformers, which PROXIMA_OLD_TRANSFORMERS names."""

import os
from pathlib import Path

import pytest

from scripts import family_exports, family_sweep

LARGEST = 1e-5  # nats
ADDED = {  # the older names of fields that the input had under the newer ones alone
    *("global_rope_theta", "local_rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rope_scaling"),
    *("layer_types", "layers_block_type", "num_experts", "rope_theta", "rotary_emb_base", "rotary_pct"),
    *("time_step_limit", "torch_dtype"),
}


@pytest.mark.campaign("tests/model/test_written_folders.py::test_the_older_names_of_positions_say_the_same")
@pytest.mark.skipif(family_exports.OLD not in os.environ, reason="needs a folder with an older transformers")
def test_exports_of_every_type_are_read_by_an_older_transformers():
    old = Path(os.environ[family_exports.OLD])
    swept = list(family_exports.swept(list(family_sweep.classes()), old))
    rows = {row["name"]: row for row in swept if "built" not in row}
    assert len(rows) >= 80
    assert not {name: row["error"] for name, row in rows.items() if "error" in row}
    assert not {name: row["changed"] for name, row in rows.items() if set(row["changed"]) - ADDED}
    wrong = {name for name, row in rows.items() if row["nats"] > LARGEST}
    assert wrong == family_exports.DIFFERENT.keys()
    for name, difference in family_exports.DIFFERENT.items():
        row = rows[name]
        assert row["nats"] == pytest.approx(difference.nats, rel=0.5), name
        assert row["own"] > LARGEST, f"{name}: no difference of the versions' own"
        assert rows[difference.alike]["nats"] <= LARGEST, difference.alike
