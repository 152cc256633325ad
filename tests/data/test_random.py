"""Draws by counter: the bits that runs depend on, and streams that do not meet."""

import numpy as np
import torch

from proxima.core.segment import value_hash
from proxima.data.random import completion_uniforms, finalize, mix, permutation, random_bits, sample_without_replacement


def test_finalize_on_int_array_and_tensor():
    states = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    assert finalize(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0
    assert finalize(np.array(states, np.uint64)).tolist() == [finalize(state) for state in states]
    positive = torch.tensor([0, 1, 5], dtype=torch.int64)  # an arithmetic shift differs where the sign bit is set
    assert finalize(positive).dtype == torch.int64 and len(set(finalize(positive).tolist())) == 3


def test_todays_bits_of_the_sampler():
    first = completion_uniforms(7, 3, 1, 4)
    assert first.view(np.uint32).tolist() == SAMPLER
    assert (completion_uniforms(7, 3, 1, 4, turn=0) == first).all()
    turns = [tuple(completion_uniforms(7, 3, 1, 4, turn=turn).tolist()) for turn in range(4)]
    assert len(set(turns)) == 4
    assert completion_uniforms(7, 3, 1, 4, turn=2).view(np.uint32).tolist() == THIRD_TURN


def test_todays_bits_of_the_bootstrap_and_of_value_hash():
    assert random_bits(3, 2, 4, 3).tolist() == BOOTSTRAP
    assert value_hash(torch.tensor([0.0, -1.5, 3.25]), torch.tensor([1.0, 1.0, -2.0])).tolist() == VALUE_HASH


def test_permutations_and_samples():
    assert permutation(6, 1, 2).tolist() == ORDER and permutation(0, 1).tolist() == []
    chosen = sample_without_replacement(100, 20, 2, 1)
    assert len(set(chosen.tolist())) == 20 and (np.diff(chosen) > 0).all() and chosen.max() < 100
    assert chosen.tolist() != sample_without_replacement(100, 20, 2, 2).tolist()
    assert mix(1, 2) != mix(2, 1)


THIRD_TURN = [1057202411, 1064462845, 1050140048, 1041072548]
# obtained from commit edd15e6
SAMPLER = [1050798282, 1063867919, 1044238784, 1028877312]
BOOTSTRAP = [[284220881, 3323838693, 29851634], [3074588012, 1228645824, 1278737940]]
VALUE_HASH = [3035652100526550566, 3124006312477531734, 7926084839514436531]
ORDER = [2, 4, 5, 0, 1, 3]
