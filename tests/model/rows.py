"""Trajectories over the tiny vocabulary, and the plain way to get their log-probs: one sequence at a time, Hugging
Face's own forward."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proxima.data import Trajectory
from proxima.model import LoadedModel, Policy
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


MIXED = ((7, (5, 0, 1, 9)), (1, (3, 3)), (18, (2,)), (4, (1, 17, 4)))


def plain_log_prob(model: PreTrainedModel, row: Trajectory, prefix: Tensor | None = None) -> Tensor:
    """Log-softmax over all logits of one sequence run alone, with no packing and no mask."""
    tokens = torch.tensor([*row.prompt_tokens, *row.tokens])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    start = len(row.prompt_tokens) - 1
    scaled = logits[start : start + len(row.tokens)] / row.temperature
    return scaled.log_softmax(dim=1).gather(1, tokens[start + 1 :, None]).squeeze(1)


def reference(model: PreTrainedModel, trajectories: list[Trajectory]) -> Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([plain_log_prob(model, row) for row in trajectories])
