"""Every causal language model type of transformers agrees with its own logits or is refused, as the page says."""

import pytest

from scripts import family_sweep


@pytest.mark.campaign("tests/model/test_proof.py::test_the_first_way_that_is_proven_is_chosen")
def test_every_type_agrees_or_is_refused():
    rows = family_sweep.swept(list(family_sweep.classes()))
    assert len({row["name"] for row in rows}) == len(family_sweep.classes())
    assert not family_sweep.wrong(rows)
    page = family_sweep.PAGE.read_text(encoding="utf-8")
    said = page.split(family_sweep.BEGIN)[1].split(family_sweep.END)[0]
    lines, measured = (text.splitlines() for text in (said, family_sweep.tables(rows)))
    assert [line for line in lines if line.startswith("|")] == [line for line in measured if line.startswith("|")]


def test_a_silent_difference_is_wrong():
    agrees = {"verdict": "agrees", "nats": 1e-6, "how": "packed"}
    rows = [{"name": "x", "class": "X", "variant": "", "trainer": agrees, "engine": agrees | {"verdict": "wrong"}}]
    assert len(family_sweep.wrong(rows)) == 1
    assert "| packed | wrong: off by 1.0e-06 nats | x |" in family_sweep.tables(rows)


def test_types_that_run_alike_are_one_row():
    agrees = {"verdict": "agrees", "nats": 1e-6, "how": "packed"}
    refused = {"verdict": "refused", "reason": "X is not supported: its logits are capped: off by 0.1 nats"}
    rows = [
        {"name": name, "class": "X", "variant": variant, "trainer": side, "engine": side}
        for name, variant, side in (("b", "", agrees), ("a", "", agrees), ("c", "", refused), ("a", "long", refused))
    ]
    rows.append({"name": "d", "class": "X", "variant": "", "built": "TypeError: no"})
    text = family_sweep.tables(rows)
    assert text.startswith("4 types: 2 agree in the trainer, 1 are refused, 1 can't be built tiny here.")
    for row in ("| packed |  | a, b |", "| refused: its logits are capped |  | c |", "| not built |  | d |"):
        assert row in text
    assert text.endswith("| long |  | a |\n")
