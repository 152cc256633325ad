"""The split by token budget, and the token count that it and the progress bar use."""

from dataclasses import replace
from itertools import pairwise

import pytest

from proxima.data.packed_batch import pack
from proxima.model.micro_batch import micro_batches, tokens_fed
from tests.model.rows import forked, opened
from tests.training.helpers import trajectories

PLAIN = trajectories()


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("budget", [1, 20, 33, 70, 10_000])
def test_tokens_are_counted_as_they_are_packed_and_stay_in_the_budget(share_prompt, budget):
    for items in (PLAIN, forked(), opened(PLAIN), opened(forked())):
        cuts = micro_batches([(item,) for item in items], budget, share_prompt=share_prompt)
        assert [i for cut in cuts for i in cut] == list(range(len(items)))
        for cut in cuts:
            members = [items[i] for i in cut]
            fed = tokens_fed([(item,) for item in members], share_prompt=share_prompt)
            assert fed == len(pack(members, share_prompt=share_prompt).tokens)
            assert fed <= budget or len(cut) == 1
        for cut, after in pairwise(cuts) if items is PLAIN else ():  # greedy: the next one did not fit
            assert len(pack([items[i] for i in (*cut, after[0])], share_prompt=share_prompt).tokens) > budget


@pytest.mark.parametrize("budget", [100, 200, 400])
def test_what_is_run_once_makes_no_micro_batch_of_more_sequences(budget):
    """Attention lays it out for each: 20 prompts behind one opening took 20 times the memory of the budget."""
    items = opened(forked())
    apart = [replace(item, prompt_tokens=(3 + item.group, *item.prompt_tokens[1:]), sampled=None) for item in items]
    assert tokens_fed([items]) < tokens_fed([apart]) - 100
    cuts = micro_batches([(item,) for item in items], budget)
    assert cuts == micro_batches([(item,) for item in apart], budget) and len(cuts) > 1
