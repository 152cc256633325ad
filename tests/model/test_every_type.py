"""Every causal language model type of transformers agrees with its own logits or is refused; the page has the table."""

import pytest

from scripts import family_sweep


@pytest.mark.campaign("tests/model/test_proof.py::test_the_first_way_that_is_proven_is_chosen")
def test_every_type_agrees_or_is_refused():
    rows = family_sweep.swept(list(family_sweep.classes()))
    assert len({row["name"] for row in rows}) == len(family_sweep.classes())
    assert not family_sweep.wrong(rows)
    page = family_sweep.PAGE.read_text(encoding="utf-8")
    said = page.split(family_sweep.BEGIN)[1].split(family_sweep.END)[0]
    assert [line.split(",")[0] for line in said.splitlines() if line.startswith("|")] == [
        line.split(",")[0] for line in family_sweep.table(rows).splitlines() if line.startswith("|")
    ]


def test_a_silent_difference_is_wrong():
    agrees = {"verdict": "agrees", "nats": 1e-6, "how": "packed"}
    rows = [{"name": "x", "class": "X", "variant": "", "trainer": agrees, "engine": agrees | {"verdict": "wrong"}}]
    assert len(family_sweep.wrong(rows)) == 1
    assert "| x | X | packed, 1e-06 | wrong: off by 1.0e-06 nats |" in family_sweep.table(rows)
