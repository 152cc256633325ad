"""Which tokens of paths are fed once, and the order in which they are packed."""

from dataclasses import replace

import numpy as np
import pytest

from proxima.data.packed_batch import (
    LEAST_SHARED,
    LEAST_SHARED_PROMPT,
    common_prompt_prefix,
    common_response_prefix,
    packing_order,
)
from proxima.data.trajectory import Trajectory
from proxima.model.micro_batch import tokens_fed
from tests.model.rows import forked


def test_paths_are_ordered_so_that_what_they_share_is_fed_once():
    paths = forked()
    mixed = [paths[i] for i in (7, 2, 5, 9, 0, 10, 3, 8, 1, 6, 4)]
    order = packing_order([(path,) for path in mixed])
    assert sorted(order) == [*range(11)] and mixed[order[0]].group == 1
    beginnings = {(x.group, x.tokens[:n].tobytes()) for x in paths for n in range(1, len(x.tokens))}
    few = 16  # tokens that begin nothing else, or less than is worth sharing
    fed = tokens_fed([[mixed[i] for i in order]])
    assert 14 + len(beginnings) <= fed < 14 + len(beginnings) + few < tokens_fed([mixed]) - 100


@pytest.mark.parametrize(
    ("alike", "expected"), [(40, 29), (20, 20), (LEAST_SHARED, LEAST_SHARED), (LEAST_SHARED - 1, 0)]
)
def test_what_two_paths_begin_with(alike, expected):
    """The last token of a response is not fed, and what is sent to other experts is computed anew."""
    place, draw = np.arange(50), np.random.default_rng(1)
    first, other = (np.where(place < alike, 7, 8 + i)[: 30 + 20 * i] for i in range(2))
    given = [Trajectory(group=0, prompt_tokens=[1], tokens=tokens, sampled=True) for tokens in (first, other)]
    assert common_response_prefix(*given) == common_response_prefix(*given[::-1]) == expected
    experts = draw.integers(0, 4, (50, 2, 2)).astype(np.int8)
    sent = [Trajectory(**{**vars(x), "routed_experts": experts[: len(x.tokens)]}) for x in given]
    assert common_response_prefix(*sent) == expected and common_response_prefix(given[0], sent[1]) == 0
    experts = experts.copy()
    experts[19] += 1  # where the token before is fed
    elsewhere = Trajectory(**{**vars(given[1]), "routed_experts": experts})
    assert common_response_prefix(sent[0], elsewhere) == min(18, expected)


def test_what_two_prompts_begin_with():
    """The last token of a prompt is fed again; what is sent to other experts from a token on is not shared."""
    tokens = np.arange(90)
    first, other = (
        Trajectory(group=i, prompt_tokens=np.where(tokens < 80, tokens, 100 + i), tokens=[1]) for i in range(2)
    )
    assert common_prompt_prefix(first, other) == 80 and common_prompt_prefix(first, first) == 89
    short = Trajectory(group=2, prompt_tokens=tokens[:LEAST_SHARED_PROMPT], tokens=[1])
    assert common_prompt_prefix(first, short) == 0  # one fewer than LEAST_SHARED_PROMPT
    experts = np.zeros((90, 2, 2), np.int8)
    moved = experts.copy()
    moved[70] = 1
    sent = [replace(x, prompt_routed_experts=rows) for x, rows in ((first, experts), (other, moved))]
    assert common_prompt_prefix(*sent) == 70 and common_prompt_prefix(sent[0], other) == 0


def test_paths_beside_plain_completions_are_ordered_too():
    plain, path, *_ = (Trajectory(group=g, prompt_tokens=[1], tokens=[5, g]) for g in range(3))
    paths = [replace(path, group=g, tokens=[5, t], sampled=[True, True]) for g, t in ((1, 9), (2, 1), (1, 2))]
    assert list(packing_order([(paths[0],), (paths[1],), (plain,), (paths[2],)])) == [3, 0, 1, 2]
    assert list(packing_order([(plain,), (path,)])) == [0, 1]
