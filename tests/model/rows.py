"""Trajectories over the tiny vocabulary, and the plain way to get their log-probs: one sequence at a time, Hugging
Face's own forward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proxima.data.trajectory import Trajectory
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from tests.tiny import VOCABULARY, tiny, tiny_tokenizer


def loaded(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return LoadedModel(model=tiny(kind, seed).to(dtype), tokenizer=tiny_tokenizer(), path=f"tiny/{kind}")


def policy(kind: str, **settings) -> Policy:
    return Policy(loaded(kind, dtype=settings.pop("dtype", torch.float32)), **settings)


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def rows(*shapes: tuple[int, tuple[int, ...]], temperature: tuple[float, ...] = (1.0,), **facts) -> list[Trajectory]:
    """`rows((5, (3, 0, 1)), (2, (4,)))`: a prompt of 5 tokens with completions of 3, 0 and 1, and one of 2 with a
    completion of 4."""
    out: list[Trajectory] = []
    for group, (prompt, lengths) in enumerate(shapes):
        for length in lengths:
            i = len(out)
            out.append(
                Trajectory(
                    prompt_tokens=ids(prompt, 1000 + group),
                    tokens=ids(length, i),
                    group=group,
                    temperature=temperature[i % len(temperature)],
                    **{name: value[i % len(value)] for name, value in facts.items()},
                )
            )
    return out


def opened(items: list[Trajectory]) -> list[Trajectory]:
    """With the same 70 tokens before every prompt."""
    return [replace(item, prompt_tokens=(*ids(70, 9), *item.prompt_tokens)) for item in items]


def forked(**facts) -> list[Trajectory]:
    """The paths of episodes of two prompts: they leave each other at several places, one where the other ends, and the
    last of a prompt at once. Tokens that they share are in the loss of some, and of several."""
    first, second, third = ids(20, 1), ids(17, 2), ids(5, 3)
    responses = (first[:18], first + ids(6, 4), first + second + third + ids(4, 5), first + second + ids(30, 6))
    responses = (*responses, first + second + ids(30, 6)[:9] + ids(1, 7), ids(9, 8))
    return [
        Trajectory(
            prompt_tokens=ids(7, 1000 + group),
            tokens=tokens,
            group=group,
            uid=group,
            sample=i,
            temperature=(1.0, 0.7)[i % 2],
            sampled=(mask := tuple((t + i) % 3 > 0 for t in range(len(tokens)))),
            loss_mask=mask,
            **facts,
        )
        for group in range(2)
        for i, tokens in enumerate(responses[group:])
    ]


MIXED = ((7, (5, 0, 1, 9)), (1, (3, 3)), (18, (2,)), (4, (1, 17, 4)))


def plain_logits(model: PreTrainedModel, row: Trajectory) -> Tensor:
    """[T, vocabulary] before each token of the response, by its temperature: of one sequence run alone, with no packing
    and no mask."""
    tokens = torch.tensor([*row.prompt_tokens, *row.tokens])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    start = len(row.prompt_tokens) - 1
    return logits[start : start + len(row.tokens)] / row.temperature


def plain_log_prob(model: PreTrainedModel, row: Trajectory) -> Tensor:
    """Log-softmax over all logits of one sequence run alone."""
    tokens = torch.tensor(row.tokens, dtype=torch.long)
    return plain_logits(model, row).log_softmax(dim=1).gather(1, tokens[:, None]).squeeze(1)


def reference(model: PreTrainedModel, trajectories: list[Trajectory]) -> Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([plain_log_prob(model, row) for row in trajectories])


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(policy: Policy, items: Sequence[Trajectory]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of a batch, and the gradients of their sum with weights from -1 to 1."""
    log_prob = policy(policy.pack(items)).log_prob
    (log_prob * torch.linspace(-1, 1, len(log_prob))).sum().backward()
    return log_prob.detach(), gradients_of(policy.model)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """To the bit, names too."""
    return actual.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in actual.items())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest entry of all, tensor by tensor."""
    assert actual.keys() == expected.keys()
    size = max(float(x.abs().max()) for x in expected.values())
    assert size > 0
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}"
        )
