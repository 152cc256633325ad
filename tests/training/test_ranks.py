"""Several ranks compute what one process computes: every loss, the forward stages, and the calls that end early."""

import pytest

from proxima.data import NotFiniteError
from proxima.training.process_ranks import ProcessRanks
from proxima.training.ranks import RankError, Refused, Release, SharedProblem
from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.tiny_images import make_tiny_reader
from tests.training.shared_updates import (
    SUM_LATER,
    one_of_a_group_fails,
    only_its_share,
    same_updates,
    same_updates_of_images,
    same_weights_and_ends,
)

# each is computed in another way: with statistics of all tokens, over sequences, of a head, of pairs
WHOLE = (
    *("surrogate ppo_clip", "surrogate gspo", "correction top_entropy", "a rank without any in the second"),
    *("nothing to train", "one trajectory", "value head", "reward model", "KTO", "preference sigmoid"),
)
IN_PARTS = (  # what depends on how a sequence is cut
    *("surrogate clip_cov", "aggregate sequence_mean_token_mean", "first forward", "one trajectory", "SFT"),
)

PARTS = {"context_parallel": 2}


@pytest.fixture
def folder(tiny_model):
    return tiny_model("llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout", "names"),
    [
        (2, SUM_LATER, WHOLE),  # ranks with items of their own may add up their gradients in the last micro-batch alone
        (4, PARTS, IN_PARTS),
        *campaign("tests/training/test_ranks.py::test_an_update_is_that_of_one_process", [(4, PARTS, ())]),
    ],
    ids=["shares", "parts", "every loss"],
)
def test_an_update_is_that_of_one_process(size, layout, names, folder):
    run_ranks(same_updates, size, folder, layout, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        *campaign("tests/training/test_ranks.py::test_images_are_shown_on_several_ranks", ["qwen3_vl", "smolvlm"]),
    ],
)
def test_images_are_shown_on_several_ranks(kind, tmp_path):
    make_tiny_reader(kind, tmp_path)
    run_ranks(same_updates_of_images, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [4, *campaign("tests/training/test_ranks.py::test_columns_weights_and_ended_calls", [3])]
)
def test_columns_weights_and_ended_calls(size, folder):
    run_ranks(same_weights_and_ends, size, folder)


@pytest.mark.slow
def test_a_rank_receives_only_its_share(folder):
    run_ranks(only_its_share, 4, folder)


@pytest.mark.slow
def test_a_loss_that_fails_on_one_rank_of_a_group(folder):
    run_ranks(one_of_a_group_fails, 2, folder)


def test_what_was_called_is_known_until_the_run_has_ended(monkeypatch):
    """The loss of a rank ends a call of rank 0 before its watch, another thread, says during which."""
    ranks, sent = ProcessRanks(0, 2), []
    monkeypatch.setattr(ranks, "share_value", sent.append)
    for error, lost in ((RuntimeError("Connection closed by peer"), True), (SharedProblem("NaN"), False)):
        with pytest.raises(type(error)), ranks.call(Release("policy")):
            ranks.at("update 1 of 2")
            raise error
        assert ranks.in_call == lost
        assert (ranks.status.call, ranks.status.part) == (("release of policy", "update 1 of 2") if lost else ("", ""))
    with ranks.call(Release("policy")):
        assert ranks.in_call and ranks.status.call
    assert not ranks.in_call and not ranks.status.call
    assert sent == [Release("policy")] * 3  # the other ranks make every call too


@pytest.mark.parametrize(("error", "raised"), [(NotFiniteError, SharedProblem), (ValueError, RankError)])
def test_a_problem_of_another_rank_is_of_its_kind(error, raised, monkeypatch):
    """Behind numbers that are not finite the weights are those of the step before, and the run may be resumed."""
    told, other = [], ProcessRanks(1, 2)
    monkeypatch.setattr(ProcessRanks, "gather_everywhere", lambda self, own: told.append(own) or [None, told[0]])
    monkeypatch.setattr(ProcessRanks, "name", lambda self, rank: f"rank {rank}")
    with pytest.raises(Refused):
        other.agree(error("NaN"))
    with pytest.raises(raised, match=f"rank 1: {error.__name__}: NaN"):
        ProcessRanks(0, 2).agree(None)
