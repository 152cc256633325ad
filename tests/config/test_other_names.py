"""The peers' names of our fields."""

import pytest

from proxima.config.describe import fields_of, kinds_of
from proxima.config.other_names import OTHER_NAMES
from proxima.config.schema import RunConfig


def fields_below(cls, path=""):
    for info in fields_of(cls):
        yield f"{path}{info.name}"
        below = kinds_of(info.slot).values() if info.slot else filter(None, [info.section])
        for inner in below:
            yield from fields_below(inner, f"{path}{info.name}.")


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_what_a_peer_calls_a_field_exists_here_and_is_no_field_itself(name):
    fields = set(fields_below(RunConfig))
    assert OTHER_NAMES[name] in fields
    assert OTHER_NAMES[name].rpartition(".")[2] != name
