"""Every causal language model type of transformers agrees with its own logits or is refused, as the page says."""

import pytest

from scripts import family_sweep
from tests.warm import forked_subprocess

CUTS = 24  # a few types each, so that none lasts long beside other tests


@pytest.mark.campaign("tests/model/test_proof.py::test_the_first_way_that_is_proven_is_chosen")
@pytest.mark.parametrize("cut", range(CUTS))
def test_every_type_agrees_or_is_refused(cut, monkeypatch):
    monkeypatch.setattr(family_sweep, "subprocess", forked_subprocess())
    names = family_sweep.types()[cut::CUTS]
    rows = family_sweep.swept(names)
    assert {row["name"] for row in rows} == set(names)
    assert not family_sweep.wrong(rows)
    said, measured = (named_in(text) for text in (family_sweep.PAGE.read_text(encoding="utf-8"), page_of(rows)))
    differ = {key: (said.get(key), cell) for key, cell in measured.items() if said.get(key, cell) != cell}
    assert not differ
    assert {key for key in said if key[1] in names} <= set(measured)
    assert all(("", name) in said for name in names)


def page_of(rows):
    return f"{family_sweep.BEGIN}\n{family_sweep.tables(rows)}\n{family_sweep.END}"


def named_in(page):
    """What a page says of each type that it names: how it is run, under an empty variant, and of each variant."""
    ways, variants = page.split(family_sweep.BEGIN)[1].split(family_sweep.END)[0].split("| variant |")
    said = {}
    for line in ways.splitlines():
        if line.startswith("| ") and not line.startswith("| trainer |"):
            trainer, engine, names = (cell.strip() for cell in line[1:-1].split("|"))
            said |= {("", name): (trainer, engine) for name in names.split(", ")}
    for line in variants.splitlines()[2:]:
        if line.startswith("| "):
            variant, *cells = (cell.strip() for cell in line[1:-1].split("|"))
            for verdict, names in zip(("agree", "refused"), cells, strict=True):
                said |= {(variant, name): verdict for name in names.split(", ") if name and not name.endswith(" types")}
    return said


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
