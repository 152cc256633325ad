"""Declarations of a spec in any sensible container; others are refused in one line."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from proxima.core import Reinforce
from proxima.data import UserError
from proxima.laws.spec_check import check_spec

DERIVATIVE = "derivative"


def results(spec):
    return {result.law.name: result for result in check_spec("surrogate", spec)}


@pytest.mark.parametrize(
    "declared", [(DERIVATIVE,), [DERIVATIVE], {DERIVATIVE}, {DERIVATIVE: "the weight is detached"}]
)
def test_exempt_laws_are_names_in_any_collection(declared):
    @dataclass(frozen=True)
    class Mine(Reinforce):
        exempt_laws: ClassVar = declared
        needs: ClassVar = list(Reinforce.needs)
        examples: ClassVar = ()

    assert Mine.exempt_laws == frozenset({DERIVATIVE}) and Mine.needs == Reinforce.needs
    result = results(Mine())[DERIVATIVE]
    assert (result.status, "exempt, but holds" in str(result.detail)) == ("FAILED", True)


def test_a_property_may_return_any_collection():
    @dataclass(frozen=True)
    class Mine(Reinforce):
        examples: ClassVar = ()

        @property
        def exempt_laws(self):
            return [DERIVATIVE]

    assert "exempt, but holds" in str(results(Mine())[DERIVATIVE].detail)


@pytest.mark.parametrize("declared", [DERIVATIVE, 3, (1,), ({},)])
def test_what_is_no_collection_of_names_is_refused(declared):
    with pytest.raises(
        UserError, match=r"^Mine.exempt_laws=.* must be a set of names; such as frozenset\(\{'scale'\}\)$"
    ):

        @dataclass(frozen=True)
        class Mine(Reinforce):
            exempt_laws: ClassVar = declared


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"examples": {"inputs": {}, "expected": {}}}, "examples must be a tuple of mappings, each with `inputs`"),
        ({"examples": ({"inputs": {}},)}, "examples must be a tuple of mappings, each with `inputs`"),
        ({"test_fields": ({},)}, "test_fields=({},) must map names to fields"),
        ({"test_fields": {"wide": 3}}, "test_fields={'wide': 3} must map names to fields"),
    ],
)
def test_other_declarations_in_another_shape_are_named(declared, words):
    mine = dataclass(frozen=True)(type("Mine", (Reinforce,), declared))
    result = results(mine())["declared"]
    assert result.status == "FAILED" and str(result.detail).startswith(words)
