"""The ragged column of the tokens that could be sampled: what it accepts, and how it travels to the packed batch."""

from dataclasses import replace

import numpy as np
import pytest

from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.data.flow import Completion, Prompt
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory

MASK = SamplingMask.of_sets([[7, 3], [5], [9, 2, 4]])


def test_sets_are_sorted_and_ragged():
    assert MASK.ids.tolist() == [3, 7, 5, 2, 4, 9] and MASK.offsets.tolist() == [0, 2, 3, 6]
    assert MASK.ids.dtype == np.int32 and len(MASK) == 3 and MASK.counts.tolist() == [2, 1, 3]
    assert len(SamplingMask.of_sets([])) == 0


def test_parts_and_joins_are_exact():
    assert SamplingMask.joined([MASK.part(0, 1), MASK.part(1, 3)]) == MASK
    assert MASK.part(1, 1) == SamplingMask.of_sets([]) == SamplingMask.joined([])
    assert MASK.part(1, 3) == SamplingMask.of_sets([[5], [2, 4, 9]]) != MASK


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2], [0, 1], r"offsets: \[0, 1\], expected 0 … 2"),
        ([1, 2], [0, 3, 2], "ascending"),
        ([1, 2], [1, 2], "expected 0 … 2"),
        ([], [], "expected 0 … 0"),
        ([2, 1], [0, 2], "without duplicates within each set"),
        ([1, 1], [0, 2], "without duplicates"),
        ([-1], [0, 1], "must be >= 0"),
        ([1, 2, 2], [0, 1, 3], "without duplicates"),
        ([0.5], [0, 1], "dtype float64"),
    ],
)
def test_what_is_no_sampling_mask(ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        SamplingMask(np.array(ids), np.array(offsets, np.int64))


def test_sets_of_neighbours_may_fall_or_repeat():
    mask = SamplingMask(np.array([5, 5, 1]), np.array([0, 1, 2, 2, 3]))
    assert mask == SamplingMask.of_sets([[5], [5], [], [1]])


def completion(**changes):
    return replace(Completion.of_text(4, 1, "x", [3, 5, 9]), **changes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (SamplingMask.of_sets([[3], [5]]), "2 sets for 3 tokens"),
        (SamplingMask.of_sets([[3], [], [9]]), "token 1, id 5, has an empty set"),
        (SamplingMask.of_sets([[3], [5], [8, 10]]), "token 2, id 9, is not in its set of 2: it could not"),
    ],
)
def test_a_completion_names_the_token_that_could_not_have_been_sampled(mask, message):
    with pytest.raises(UserError, match=f"prompt 4, sample 1, turn 0: sampling_mask: {message}"):
        completion(sampling_mask=mask)
    with pytest.raises(ValueError, match=message):
        Trajectory(group=0, prompt_tokens=[1], tokens=[3, 5, 9], sampling_mask=mask)


def test_completions_are_equal_by_their_masks_and_rewards_do_not_get_them():
    assert completion(sampling_mask=MASK) == completion(sampling_mask=MASK.part(0, 3)) != completion()
    assert completion(sampling_mask=MASK).to_json()["sampling_mask"] is None


def test_the_behavior_policy_decides_whether_the_trajectory_has_it():
    prompt, made = Prompt(uid=4, messages=(), tokens=[1, 2]), completion(sampling_mask=MASK)
    for name, mask in (("sampled", made.sampling_mask), ("untruncated", None)):
        assert Trajectory.of(prompt, made, group=0, advantage=1.0, behavior=name).sampling_mask is mask


def test_a_token_that_nobody_sampled_has_no_set():
    mask = SamplingMask.of_sets([[3], [], [9]])
    kept = [True, False, True]
    facts = {"group": 0, "prompt_tokens": [1], "tokens": [3, 5, 9], "sampled": kept, "loss_mask": kept}
    item = Trajectory(**facts, sampling_mask=mask)
    assert pack([item]).sampling_mask_cu.tolist() == [0, 1, 1, 2]


def test_pack_joins_them_in_order():
    first = Trajectory(group=0, prompt_tokens=[1], tokens=[3, 5, 9], sampling_mask=MASK)
    nothing = Trajectory(group=0, prompt_tokens=[1], tokens=[])
    last = Trajectory(group=1, prompt_tokens=[2], tokens=[4], sampling_mask=SamplingMask.of_sets([[4, 6]]))
    batch = pack([first, nothing, last])
    assert batch.sampling_mask.tolist() == [3, 7, 5, 2, 4, 9, 4, 6]
    assert batch.sampling_mask_cu.tolist() == [0, 2, 3, 6, 8]
    assert pack([replace(first, sampling_mask=None)]).sampling_mask is None
    with pytest.raises(ValueError, match="sampling_mask is missing from trajectory 1 and present in others"):
        pack([first, replace(last, sampling_mask=None)])
