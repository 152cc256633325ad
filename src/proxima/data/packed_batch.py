"""Trajectories laid out for one forward pass: no padding, and a shared prompt only once.

    tokens   | prompt 0 | response 0.0 | response 0.1 | prompt 1 | response 1.0 | …        axis L, what the model is fed
    segment  |    0     |      1       |      2       |    3     |      4       | …
    axis G; a response's parent is its prompt
    targets        | response 0.0 | response 0.1 | response 1.0 | …
    axis N, what the loss is about

A response token attends to its parent and to its own segment up to itself. Its position continues from its parent's
length, so the model computes what it would for the sequence alone. The last token of a response predicts nothing and is
not fed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxima.data.columns import column_dtypes
from proxima.data.field_checks import check_fields
from proxima.data.policy_batch import HostCounts, PolicyBatch
from proxima.data.sampling_mask import SamplingMask
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The model's input (axis L, in G segments) and the tokens of the loss (axis N, in S sequences).

    Args:
        tokens, position: [L] int64, ids and positions in their own sequence.
        segment_cu: [G+1] int64, 0 … L; segment g is `segment_cu[g]:segment_cu[g+1]`. Segments may be empty.
        parent: [G] int64, the segment that a segment continues, or -1. A parent has no parent.
        predict: [N] int64, index in L of the hidden state that predicts response token n (law: log_prob[t] is of token
            t given all before).
        target: [N] int64, the response token ids.
        temperature: [N] float32.
        reward, returns, value, score_variance: [N] float32, see `Trajectory`.
        sampling_mask, sampling_mask_cu: [M] and [N+1] int64, token n was drawn from
            `sampling_mask[sampling_mask_cu[n]:sampling_mask_cu[n+1]]`, see `SamplingMask`; None: from the vocabulary.
        routed_experts: [L, M, K] int8 or int16, the experts that each token is sent to, -1 where the routers choose; a
            shared prompt has those of its first response. None: they choose everywhere.
        tokens_of, sampled_of, in_loss_of: of each sequence, how many response tokens it has, how many of them are
            sampled, and how many are in the loss; on the host.
        edges, parents: `segment_cu` and `parent`, on the host; `sampling_mask_edges`: `sampling_mask_cu` likewise.
        newest_version: the largest of `policy_version`, on the host; -1 without one.
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
    tokens_of: tuple[int, ...]
    sampled_of: tuple[int, ...]
    in_loss_of: tuple[int, ...]
    edges: tuple[int, ...]
    parents: tuple[int, ...]
    sampling_mask_edges: tuple[int, ...] = ()
    newest_version: int = -1
    behavior_log_prob: Annotated[Tensor | None, "float N"] = None
    policy_version: Annotated[Tensor | None, "int N"] = None
    proximal_log_prob: Annotated[Tensor | None, "float N"] = None
    next_log_prob: Annotated[Tensor | None, "float N"] = None
    reference_log_prob: Annotated[Tensor | None, "float N"] = None
    reward: Annotated[Tensor | None, "float N"] = None
    returns: Annotated[Tensor | None, "float N"] = None
    value: Annotated[Tensor | None, "float N"] = None
    score_variance: Annotated[Tensor | None, "float N"] = None
    top_k: Annotated[Tensor | None, "int N K"] = None
    behavior_top_k_log_prob: Annotated[Tensor | None, "float N K"] = None
    teacher_log_prob: Annotated[Tensor | None, "float N"] = None
    bucket_token: Annotated[Tensor | None, "int N J"] = None
    teacher_bucket_log_prob: Annotated[Tensor | None, "float N J"] = None
    sampling_mask: Annotated[Tensor | None, "int M"] = None
    sampling_mask_cu: Annotated[Tensor | None, "int N+1"] = None
    routed_experts: Annotated[Tensor | None, "id L M K"] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.cu_seqlens) - 1

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """Of each sequence, where its prompt begins and ends in L."""
        return [(self.edges[p], self.edges[p + 1]) for p in self.parents if p >= 0]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Every tensor on `device`; the batch itself if it is there."""
        if self.tokens.device == torch.device(device):
            return self
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {name: to_device(value, device) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **moved)

    def policy_batch(
        self,
        log_prob: Tensor,
        entropy: Tensor | None = None,
        top_k_log_prob: Tensor | None = None,
        bucket_log_prob: Tensor | None = None,
    ) -> PolicyBatch:
        """The input of the loss: the columns that both batches have, and the model's outputs."""
        of_sequences = self.tokens_of, self.sampled_of, self.in_loss_of
        counts = HostCounts(*of_sequences, self.cu_seqlens, self.sampled, self.loss_mask)
        shared = {f.name for f in fields(self)} & {f.name for f in fields(PolicyBatch)}
        facts = {name: getattr(self, name) for name in shared}
        return PolicyBatch(
            log_prob=log_prob,
            token=self.target,
            entropy=entropy,
            top_k_log_prob=top_k_log_prob,
            bucket_log_prob=bucket_log_prob,
            host_counts=counts,
            **facts,
        )


def pack(trajectories: Sequence[Trajectory], *, share_prompt: bool = True, routes: bool = False) -> PackedBatch:
    """Lay trajectories out in their order; neighbours of the same group share their prompt when `share_prompt`.
    `routes`: with the `routed_experts` of those that have some.

    ValueError for one group with different prompts, a per-token fact that only some trajectories have, or a token in
    the loss that is not sampled."""
    lengths = np.array([len(item.tokens) for item in trajectories], np.int64)
    group = np.array([item.group for item in trajectories], np.int64)
    opens = np.append(True, group[1:] != group[:-1])[: len(group)]  # another group than its neighbour's
    for before, item, other in zip(trajectories, trajectories[1:], opens[1:], strict=False):
        if not other and not np.array_equal(before.prompt_tokens, item.prompt_tokens):
            raise ValueError(f"pack: group {item.group} mixes prompts; each prompt needs its own group number.")
    if not share_prompt:
        opens[:] = True

    # segments: each response, with its prompt before it where the prompt is laid out
    pieces: list[NDArray[Any]] = []
    for item, own_prompt in zip(trajectories, opens, strict=True):
        pieces += [item.prompt_tokens, item.tokens[:-1]] if own_prompt else [item.tokens[:-1]]
    segment_cu = _prefix_sum(np.array([len(piece) for piece in pieces], np.int64))
    response = np.cumsum(1 + opens) - 1  # [S], the segment of each response
    prompt = (response - 1)[opens][np.cumsum(opens) - 1] if len(opens) else response  # [S], of its prompt
    parent = np.full(len(pieces), -1, np.int64)
    parent[response] = prompt
    start = np.zeros(len(pieces), np.int64)  # position of each segment's first token
    start[response] = [len(item.prompt_tokens) for item in trajectories]
    cu_seqlens = _prefix_sum(lengths)
    # token t of a response is predicted at t - 1 of its segment, the first at the end of its prompt
    predict = np.arange(cu_seqlens[-1]) + np.repeat(segment_cu[response] - 1 - cu_seqlens[:-1], lengths)
    predict[cu_seqlens[:-1][lengths > 0]] = segment_cu[prompt + 1][lengths > 0] - 1
    columns = {
        "tokens": _joined(pieces, np.int64),
        "position": np.arange(segment_cu[-1]) - np.repeat(segment_cu[:-1] - start, np.diff(segment_cu)),
        "segment_cu": segment_cu,
        "parent": parent,
        "predict": predict,
        "target": _joined([item.tokens for item in trajectories], np.int64),
        "temperature": np.repeat(np.array([item.temperature for item in trajectories], np.float32), lengths),
        "cu_seqlens": cu_seqlens,
        "group": group,
        "advantage": _joined([item.advantage for item in trajectories], np.float32),
    }
    columns |= _optional(trajectories)
    if routes:
        from proxima.data.routed_experts import packed_experts

        columns |= packed_experts(trajectories, opens)
    if (wrong := columns["loss_mask"] & ~columns["sampled"]).any():
        raise ValueError(f"pack: token {wrong.argmax()} of the batch is in the loss but not sampled.")
    masks = (columns["sampled"], columns["loss_mask"])
    sampled_of, in_loss_of = (tuple(np.diff(_prefix_sum(mask)[cu_seqlens]).tolist()) for mask in masks)
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    tokens_of = tuple(lengths.tolist())
    versions, masks_cu = columns.get("policy_version"), columns.get("sampling_mask_cu")
    return PackedBatch(
        **tensors,
        tokens_of=tokens_of,
        sampled_of=sampled_of,
        in_loss_of=in_loss_of,
        edges=tuple(segment_cu.tolist()),
        parents=tuple(parent.tolist()),
        sampling_mask_edges=() if masks_cu is None else tuple(masks_cu.tolist()),
        newest_version=-1 if versions is None else int(versions.max(initial=-1)),
    )


def _optional(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """The columns that a trajectory may lack, joined; a mask that is None is all True."""
    out: dict[str, NDArray[Any]] = {}
    for name, dtype in column_dtypes(Trajectory).items():
        if name in ("prompt_tokens", "tokens", "advantage"):
            continue
        values = [getattr(item, name) for item in trajectories]
        if name in ("loss_mask", "sampled"):
            given = zip(values, trajectories, strict=True)
            values = [np.broadcast_to(True, len(item.tokens)) if mask is None else mask for mask, item in given]
        present = [value is not None for value in values]
        if any(present) and not all(present):
            raise ValueError(f"pack: {name} is missing from trajectory {present.index(False)} and present in others.")
        if all(present) and (values or dtype.kind == "b"):
            out[name] = _joined(values, np.int64 if dtype.kind == "i" else dtype)
    return out | _sampling_mask(trajectories)


def _sampling_mask(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """All trajectories have one, or none has; one without a token needs none."""
    masks = [item.sampling_mask for item in trajectories]
    if all(mask is None for mask in masks):
        return {}
    for i, (mask, item) in enumerate(zip(masks, trajectories, strict=True)):
        if mask is None and len(item.tokens):
            raise ValueError(f"pack: sampling_mask is missing from trajectory {i} and present in others.")
    joined = SamplingMask.joined([mask for mask in masks if mask is not None])
    return {"sampling_mask": joined.ids.astype(np.int64), "sampling_mask_cu": joined.offsets}


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    filled = [part for part in parts if len(part)] or [np.empty((0, *parts[0].shape[1:]) if parts else 0, dtype)]
    return np.concatenate(filled, dtype=dtype, casting="same_kind")


def _prefix_sum(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])
