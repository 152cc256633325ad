"""Sides of pairs whose turns are on several paths: their log-prob is the sum over the trained tokens of all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.preference.protocol import PreferencePairs
from proxima.data.packed_batch import pack
from proxima.data.trajectory import ChatExample, LabeledCompletion, PreferencePair, Trajectory, paths_of
from proxima.model.policy import Policy
from proxima.training.objectives.preference_objective import KtoObjective, PreferenceObjective
from proxima.training.offline.preference_method import with_mismatched
from proxima.training.offline.reward_method import RewardObjective
from tests.model.rows import assert_close, loaded, plain_log_prob
from tests.tiny import tiny
from tests.training.helpers import recorded

BETA = 0.3


def side(group, sample, *lengths):
    """A side with a path of each length; every third token is context, and of one path none."""
    draw = np.random.default_rng(100 * group + 10 * sample + len(lengths))
    prompt = np.random.default_rng(group).integers(3, 259, 4 + group).astype(np.int32)
    paths = []
    for turn, length in enumerate(lengths):
        tokens = draw.integers(3, 259, length).astype(np.int32)
        mask = np.arange(length) % 3 != turn if turn else None
        reference = draw.normal(-5, 1, length).astype(np.float32)
        columns = {"prompt_tokens": prompt, "tokens": tokens, "loss_mask": mask, "reference_log_prob": reference}
        paths.append(Trajectory(group=group, sample=sample, turn=turn, **columns))
    return paths[0] if len(paths) == 1 else ChatExample(row=group, paths=tuple(paths))


PAIRS = [
    PreferencePair(row=0, chosen=side(0, 0, 5, 9), rejected=side(0, 1, 7)),
    PreferencePair(row=1, chosen=side(1, 0, 4), rejected=side(1, 1, 3, 6, 8)),
    PreferencePair(row=2, chosen=side(2, 0, 6, 4), rejected=side(2, 1, 12, 2)),
]


def trained(columns, paths):
    """The values of the trained tokens of all paths, in order."""
    masks = [np.ones(len(path.tokens), bool) if path.loss_mask is None else path.loss_mask for path in paths]
    return torch.cat([column[torch.from_numpy(mask)] for column, mask in zip(columns, masks, strict=True)])


def plain_pairs(model, *, alpha=1.0, mean=False):
    columns = {}
    for name in ("chosen", "rejected"):
        ours, frozen, lengths = [], [], []
        for pair in PAIRS:
            both = [paths_of(pair.chosen), paths_of(pair.rejected)]
            counts = [len(trained([torch.from_numpy(path.tokens) for path in paths], paths)) for paths in both]
            paths = paths_of(getattr(pair, name))
            own = trained([plain_log_prob(model, path) for path in paths], paths)
            reference = trained([torch.from_numpy(path.reference_log_prob) for path in paths], paths)
            weight = torch.where(torch.arange(len(own)) < min(counts), 1.0, alpha)
            reduce = torch.mean if mean else torch.sum
            ours.append(reduce(weight * own))
            frozen.append(reduce(weight * reference))
            lengths.append(len(own))
        columns |= {name: torch.stack(ours), f"reference_{name}": torch.stack(frozen)}
        columns[f"{name}_length"] = torch.tensor(lengths)
    return PreferencePairs(**columns)


@pytest.mark.parametrize(
    ("kind", "settings", "reduced"),
    [
        ("sigmoid", {}, {}),
        ("ipo", {}, {}),
        ("aot", {}, {}),
        ("sigmoid", {"ld_alpha": 0.25}, {"alpha": 0.25}),
        ("sigmoid", {"reduce": "mean"}, {"mean": True}),
    ],
)
def test_a_pair(kind, settings, reduced):
    term, model = PREFERENCES[kind](beta=BETA), tiny("llama")
    expected = plain_pairs(model, **reduced)
    loss = term(expected).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for budget in (1, 10_000):
        policy = Policy(loaded("llama"))
        gradient, result = recorded(PreferenceObjective(terms=(term,), **settings), PAIRS, budget, model=policy)
        assert_close(gradient, gradients, 5e-5)
        assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=2e-6)
        margins = term.metrics(expected)["rewards/margins"].value
        assert result.metrics["rewards/margins"] == pytest.approx(margins, rel=2e-5)


def test_a_labeled_completion():
    model, spec = tiny("llama"), Kto(beta=BETA)
    every = [s for pair in PAIRS for s in (pair.chosen, pair.rejected)]
    items = [LabeledCompletion(row=i, completion=s, good=i % 2 == 0) for i, s in enumerate(every)]
    items = with_mismatched(items, 64)

    def gap(item):
        paths = paths_of(item)
        own = trained([plain_log_prob(model, path) for path in paths], paths)
        return own.sum() - trained([torch.from_numpy(path.reference_log_prob) for path in paths], paths).sum()

    for item in items:
        assert {tuple(path.prompt_tokens) for path in item.sides} == {tuple(item.sides[0].prompt_tokens)}
    anchor = torch.stack([gap(item.mismatched) for item in items]).mean().detach()
    ours = torch.stack([gap(item.completion) for item in items])
    good = torch.tensor([item.good for item in items])
    loss = spec(ours, torch.zeros(len(items)), good, anchor).mean()
    loss.backward()
    policy = Policy(loaded("llama"))
    gradient, result = recorded(KtoObjective(spec=spec), items, 10_000, model=policy)
    assert_close(gradient, {name: p.grad for name, p in model.named_parameters()}, 5e-5)
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=2e-6)
    assert result.metrics["kl"] == pytest.approx(float(anchor), rel=2e-5)


def test_a_reward_model_scores_the_last_turn_and_what_precedes_it_there():
    sequences = RewardObjective().sequences(PAIRS[1])
    for sequence, scored in zip(sequences, (PAIRS[1].chosen, PAIRS[1].rejected.paths[-1]), strict=True):
        assert np.array_equal(sequence.tokens[:-1], scored.tokens)


def test_sides_with_other_columns_are_the_same_paths():
    for pair in PAIRS:
        numbered = [replace(path, uid=number) for number, path in enumerate(pair.sides)]
        other = pair.with_sides(numbered)
        assert other.sides == tuple(numbered)
        assert len(paths_of(other.chosen)) == len(paths_of(pair.chosen))


def test_neighbours_of_one_turn_each_are_completions_of_their_own():
    alone = [replace(path, turn=0) for pair in PAIRS for path in pair.sides]
    batch = pack(alone)
    assert batch.completions == tuple(range(len(alone) + 1))
    assert batch.cu_completions is batch.cu_seqlens
    assert pack([path for pair in PAIRS for path in pair.sides]).completions == (0, 2, 3, 4, 7, 9, 11)
