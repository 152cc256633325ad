"""Trajectories laid out for one forward pass: no padding, and a shared prompt only once.

    tokens   | prompt 0 | response 0.0 | response 0.1 | prompt 1 | response 1.0 | …        axis L, what the model is fed
    segment  |    0     |      1       |      2       |    3     |      4       | …
    axis G; a response's parent is its prompt
    targets        | response 0.0 | response 0.1 | response 1.0 | …
    axis N, what the loss is about

A response token attends to its parent and to its own segment up to itself. Its position goes on from its parent's
length, so the model sees just what it would see were the sequence alone. The last token of a response predicts nothing
and is not fed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from proxima.data.check import check_fields
from proxima.data.policy_batch import PolicyBatch
from proxima.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """What the model is fed (axis L, in G segments) and what the loss is about (axis N, in S sequences).

    Args:
        tokens, position: [L] int64, ids and positions in their own sequence.
        segment_cu: [G+1] int64, 0 … L; segment g is `segment_cu[g]:segment_cu[g+1]`. Segments may be empty.
        parent: [G] int64, the segment a segment goes on from, or -1. A parent has no parent.
        predict: [N] int64, index in L of the hidden state that predicts response token n (law: log_prob[t] is of token
            t given all before).
        target: [N] int64, the response token ids.
        temperature: [N] float32.
        the rest: see `PolicyBatch`.
    """

    tokens: Annotated[Tensor, "int L"]
    position: Annotated[Tensor, "int L"]
    segment_cu: Annotated[Tensor, "int G+1"]
    parent: Annotated[Tensor, "int G"]
    predict: Annotated[Tensor, "int N"]
    target: Annotated[Tensor, "int N"]
    temperature: Annotated[Tensor, "float N"]
    cu_seqlens: Annotated[Tensor, "int S+1"]
    group: Annotated[Tensor, "int S"]
    loss_mask: Annotated[Tensor, "bool N"]
    sampled: Annotated[Tensor, "bool N"]
    advantage: Annotated[Tensor, "float N"]
    behavior_log_prob: Annotated[Tensor | None, "float N"] = None
    policy_version: Annotated[Tensor | None, "int N"] = None
    proximal_log_prob: Annotated[Tensor | None, "float N"] = None
    reference_log_prob: Annotated[Tensor | None, "float N"] = None
    top_k: Annotated[Tensor | None, "int N K"] = None
    behavior_top_k_log_prob: Annotated[Tensor | None, "float N K"] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Every tensor on `device`."""
        moved = {f.name: value.to(device) for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **moved)

    def policy_batch(
        self, log_prob: Tensor, entropy: Tensor | None = None, top_k_log_prob: Tensor | None = None
    ) -> PolicyBatch:
        """What the loss reads, once the model has answered."""
        return PolicyBatch(
            log_prob=log_prob,
            entropy=entropy,
            loss_mask=self.loss_mask,
            sampled=self.sampled,
            cu_seqlens=self.cu_seqlens,
            group=self.group,
            advantage=self.advantage,
            behavior_log_prob=self.behavior_log_prob,
            proximal_log_prob=self.proximal_log_prob,
            reference_log_prob=self.reference_log_prob,
            policy_version=self.policy_version,
            top_k=self.top_k,
            top_k_log_prob=top_k_log_prob,
            behavior_top_k_log_prob=self.behavior_top_k_log_prob,
        )


def pack(trajectories: Sequence[Trajectory], *, share_prompt: bool = True) -> PackedBatch:
    """Lay trajectories out in their order; neighbours of the same group share their prompt when `share_prompt`.

    Raises:
        ValueError: trajectories of one group with different prompts, or a per-token fact that only some trajectories
            have.
    """
    tokens: list[int] = []
    position: list[int] = []
    segment_cu, parent, predict = [0], [], []
    prompt_at = -1  # segment of the prompt laid out last
    before: Trajectory | None = None

    def lay(ids: Sequence[int], start: int, parent_segment: int) -> None:
        tokens.extend(ids)
        position.extend(range(start, start + len(ids)))
        segment_cu.append(len(tokens))
        parent.append(parent_segment)

    for item in trajectories:
        same_group = before is not None and before.group == item.group
        if same_group and before is not None and before.prompt_tokens != item.prompt_tokens:
            raise ValueError(f"pack: group {item.group} mixes prompts; each prompt needs its own group number.")
        if not (share_prompt and same_group):
            lay(item.prompt_tokens, 0, -1)
            prompt_at = len(parent) - 1
        before = item
        if item.tokens:
            predict.append(segment_cu[prompt_at + 1] - 1)
            predict.extend(range(len(tokens), len(tokens) + len(item.tokens) - 1))
        lay(item.tokens[:-1], len(item.prompt_tokens), prompt_at)

    lengths = [len(item.tokens) for item in trajectories]
    counts = torch.tensor(lengths, dtype=torch.long)
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.long),
        position=torch.tensor(position, dtype=torch.long),
        segment_cu=torch.tensor(segment_cu, dtype=torch.long),
        parent=torch.tensor(parent, dtype=torch.long),
        predict=torch.tensor(predict, dtype=torch.long),
        target=torch.tensor([t for item in trajectories for t in item.tokens], dtype=torch.long),
        temperature=torch.tensor([item.temperature for item in trajectories]).repeat_interleave(counts),
        cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        group=torch.tensor([item.group for item in trajectories], dtype=torch.long),
        advantage=torch.tensor([item.advantage for item in trajectories], dtype=torch.float32).repeat_interleave(
            counts
        ),
        **_per_token(trajectories),
    )


def _per_token(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name in ("loss_mask", "sampled"):
        values = [v for item in trajectories for v in (getattr(item, name) or (True,) * len(item.tokens))]
        out[name] = torch.tensor(values, dtype=torch.bool)
    dtypes: dict[str, Any] = dict.fromkeys(
        ("behavior_log_prob", "proximal_log_prob", "reference_log_prob"), torch.float32
    )
    dtypes |= {"behavior_top_k_log_prob": torch.float32, "policy_version": torch.long, "top_k": torch.long}
    for name, dtype in dtypes.items():
        present = [getattr(item, name) is not None for item in trajectories]
        if any(present):
            if not all(present):
                raise ValueError(
                    f"pack: {name} is missing from trajectory {present.index(False)} and present in others."
                )
            out[name] = torch.tensor([v for item in trajectories for v in getattr(item, name)], dtype=dtype)
    return out
