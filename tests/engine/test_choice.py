"""An engine that a config names: a server that was started for it is checked once it runs."""

from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.engine.engine_selection import EngineSelection, computes_here
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import EngineSpec
from tests.engine.helpers import unloaded


class Built:
    def __init__(self):
        self.closed = False

    def check(self, needs):
        if needs.refused:
            raise FieldError("sampling", 1, "must be 2")
        return ["its weights are coarse"]

    def close(self):
        self.closed = True


def build(serve, *, refused=False):
    """The engine, and what `EngineSelection.build` says."""
    made = Built()
    needs = SimpleNamespace(model=unloaded(), refused=refused, adapter_rank=0, sleeps=False)
    choice = EngineSelection(spec=SimpleNamespace(serve=serve, build=lambda setup: made), needs=needs)
    try:
        engine, notes = choice.build(lambda: None, compute=None, log=None, seed=0)
    except FieldError as error:
        return made, error.field
    assert engine is made
    return made, notes


@pytest.mark.parametrize(
    ("serve", "refused", "said", "closed"),
    [
        (None, True, [], False),
        ("a server", False, ["engine: its weights are coarse"], False),
        ("a server", True, "engine.sampling", True),
    ],
)
def test_a_server_is_checked_once_it_runs(serve, refused, said, closed):
    """One that runs already is checked before, by its spec."""
    made, found = build(serve, refused=refused)
    assert (found, made.closed) == (said, closed)


def test_a_spec_of_another_package_need_not_derive_from_ours():
    assert computes_here(Local()) and not computes_here(SimpleNamespace(build=None))


def test_what_a_spec_switches_on_may_be_any_attribute():
    class Masks(EngineSpec):
        sampling_mask = property(lambda self: True)

    assert Masks().provides == {"behavior_log_prob", "policy_version", "sampling_mask"}
