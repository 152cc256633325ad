"""What ranks that split the tokens of a batch do beside `passes.compare`, against one process."""

from dataclasses import replace

import numpy as np
import torch

from proxima.data.columns import SamplingMask
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import PackedModel
from proxima.model.scalar_model import ScalarModel
from tests.model.parallel.passes import NEEDS, gradients
from tests.model.rows import MIXED, forked, opened, rows


def masked(sequences: list[Trajectory]) -> list[Trajectory]:
    """Each with a set of tokens that it was sampled from, a top-k and a teacher's buckets."""
    draw, out = np.random.default_rng(3), []
    for row in sequences:
        sets = [sorted({int(token), *draw.integers(3, 200, 5).tolist()}) for token in row.tokens]
        sets[1:2] = [[] for _ in sets[1:2]]  # the whole vocabulary, of a token that was not sampled
        sampled = np.arange(len(row.tokens)) != 1
        out.append(
            replace(
                row,
                temperature=0.7,
                sampled=sampled,
                loss_mask=sampled,
                sampling_mask=SamplingMask.of_sets(sets),
                top_k=draw.integers(3, 200, (len(row.tokens), 3)),
                behavior_top_k_log_prob=np.full((len(row.tokens), 3), -2.0),
                bucket_token=draw.integers(3, 200, (len(row.tokens), 2)),
                teacher_bucket_log_prob=np.full((len(row.tokens), 2), -2.0),
            )
        )
    return out


def outputs(plain: PackedModel, split: PackedModel) -> None:
    """Every output of a policy, and the gradient through each."""
    sequences = masked([*rows(*MIXED), *opened(forked())])
    given = []
    for model in (plain, split):
        for parameter in model.model.parameters():
            parameter.grad = None
        out = model(model.pack(sequences), NEEDS | {"log_sum_square"})
        loss = out.log_prob.sin().sum() + out.entropy.sum() + out.bucket_log_prob.cos().sum()
        loss.backward()
        given.append({name: x for name, x in vars(out).items() if x is not None} | {"loss": loss})
    assert given[0].keys() == given[1].keys() > {"top_k_log_prob", "log_sum_square", "bucket_log_prob"}
    torch.testing.assert_close(given[1], given[0], rtol=1e-5, atol=1e-5)
    expected, got = gradients(plain), gradients(split)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=name)


def short(plain: PackedModel, split: PackedModel) -> None:
    """Fewer tokens than ranks, and response tokens of one rank alone."""
    for shape in ((1, (1,)), (1, (2,)), (9, (1, 1)), (1, (12,))):
        sequences = rows(shape)
        ours, theirs = (model(model.pack(sequences), NEEDS) for model in (split, plain))
        torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-5, atol=1e-5)
        (ours.log_prob.sum() + ours.entropy.sum()).backward()


def scores(plain: ScalarModel, split: ScalarModel) -> None:
    """Of the last token's state, as a reward model gives them."""
    np.testing.assert_allclose(split.scores(rows(*MIXED), 30), plain.scores(rows(*MIXED), 30), rtol=1e-5, atol=1e-5)
