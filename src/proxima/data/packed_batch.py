"""Trajectories laid out for one forward pass: without padding, and with prefixes that neighbours share stored once.

    tokens   | prompt 0 | response 0.0 | response 0.1 | prompt 1 | response 1.0 | …        axis L, the model's input
    segment  |    0     |      1       |      2       |    3     |      4       | …
    axis G; a response's parent is its prompt
    targets        | response 0.0 | response 0.1 | response 1.0 | …
    axis N, the tokens of the loss

A response token attends to its prompt and to its own segment up to itself. Its position continues from the prompt's
length, so the model computes the same as for the sequence alone. The last token of a response predicts nothing and is
not fed.

Prompts of neighbouring groups may share a prefix, such as a long system prompt. A prompt is then fed only from where it
diverges from its neighbour, its parent, and attends to the shared tokens. The responses of the paths of an episode
share prefixes in the same way. Axis N still has all tokens of every response: one hidden state may predict several
targets, each with its own place in the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxima.data.columns import TOKEN_COLUMNS, SamplingMask, TokenColumn
from proxima.data.field_checks import check_fields
from proxima.data.policy_batch import HostCounts, PolicyBatch
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import to_device

LEAST_SHARED = 16  # with fewer shared tokens, a path is fed from its prompt on
LEAST_SHARED_PROMPT = 64  # with fewer shared tokens, a prompt is fed whole


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The model's input (axis L, in G segments) and the tokens of the loss (axis N, in S sequences).

    Args:
        tokens, position: [L] int64, token ids, and their positions in their own sequence.
        predict: [N] int64, index in L of the hidden state that predicts response token n (law: log_prob[t] is of token
            t given all tokens before it).
        target: [N] int64, the response token ids.
        temperature: [N] float32.
        reward, returns, value, score_variance, echo: [N] float32, and taught: [N] int64, see `Trajectory`.
        sampling_mask, sampling_mask_cu: [M] and [N+1] int64, token n was drawn from
            `sampling_mask[sampling_mask_cu[n]:sampling_mask_cu[n+1]]`, see `SamplingMask`; None: from the whole
            vocabulary.
        routed_experts: [L, M, K] int8 or int16, the experts to which each token is sent, -1 where the routers choose; a
            shared prompt has the experts of its first response. None: the routers choose everywhere.
        tokens_of, sampled_of, in_loss_of: for each sequence, the number of its response tokens, of those sampled, and
            of those in the loss; on the host.
        edges: on the host, 0 … L; segment g is `edges[g]:edges[g+1]`. Segments may be empty.
        parents: for each segment, the segment that it continues, or -1 for a whole prompt; see `contexts`.
        responses: for each sequence, the segment of its response; the other segments are of prompts.
        completions: on the host, the first sequence of each completion, and S: the sequences between two of them are
            the paths of one; see `ChatExample`.
        seen: for each segment, how many tokens precede it in its sequence.
        sampling_mask_edges: `sampling_mask_cu`, on the host.
        newest_version: the largest `policy_version`, on the host; -1 if unknown.
        echo_tokens: the number of tokens with an `echo` above 0, on the host; none of them is sampled.
        the rest: see `PolicyBatch`.

    Raises: ValueError naming the field, its shape or dtype, and what was expected.
    """

    tokens: Annotated[Tensor, "int L"]
    position: Annotated[Tensor, "int L"]
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
    responses: tuple[int, ...]
    seen: tuple[int, ...]
    completions: tuple[int, ...]
    sampling_mask_edges: tuple[int, ...] = ()
    newest_version: int = -1
    echo_tokens: int = 0
    echo: Annotated[Tensor | None, "float N"] = None
    taught: Annotated[Tensor | None, "int N"] = None
    behavior_log_prob: Annotated[Tensor | None, "float N"] = None
    policy_version: Annotated[Tensor | None, "int N"] = None
    proximal_log_prob: Annotated[Tensor | None, "float N"] = None
    next_log_prob: Annotated[Tensor | None, "float N"] = None
    chained_log_ratio: Annotated[Tensor | None, "float N"] = None
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
    def cu_completions(self) -> Tensor:
        """[C+1] int64, the edges of the completions on axis N; of completions with one path each, `cu_seqlens`."""
        if len(self.completions) == len(self.cu_seqlens):
            return self.cu_seqlens
        edges = torch.tensor(self.completions)
        return self.cu_seqlens[to_device(edges, self.cu_seqlens.device)]

    @property
    def prompts(self) -> list[list[tuple[int, int]]]:
        """For each sequence, the spans of L that hold its prompt, in order; the context of its response begins with
        them."""
        contexts = self.contexts()
        responses = set(self.responses)
        out: list[list[tuple[int, int]]] = []
        for segment in self.responses:
            while segment in responses:
                segment = self.parents[segment]
            out.append([*contexts[segment], (self.edges[segment], self.edges[segment + 1])])
        return out

    def contexts(self) -> list[list[tuple[int, int]]]:
        """For each segment, the spans of L with the tokens before it, in order: the first `seen` tokens of its parent's
        sequence. A whole prompt has none; a response that shares only its prompt has the spans of the prompt."""
        out: list[list[tuple[int, int]]] = []
        for parent, seen in zip(self.parents, self.seen, strict=True):
            spans: list[tuple[int, int]] = []
            if parent >= 0:
                of_parent = (self.edges[parent], self.edges[parent + 1])
                spans = _first_tokens([*out[parent], of_parent], seen)
            out.append(spans)
        return out

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch with every tensor on `device`; the batch itself if it is already there."""
        if self.tokens.device == torch.device(device):
            return self
        moved: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = to_device(value, device)
        return replace(self, **moved)

    def policy_batch(
        self,
        log_prob: Tensor,
        entropy: Tensor | None = None,
        top_k_log_prob: Tensor | None = None,
        bucket_log_prob: Tensor | None = None,
    ) -> PolicyBatch:
        """The input of the loss: the columns that both classes share, and the model's outputs, [N] or [N, K] each."""
        counts = HostCounts(
            self.tokens_of, self.sampled_of, self.in_loss_of, self.cu_seqlens, self.sampled, self.loss_mask
        )
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
    """Lay out trajectories in their order.

    Args:
        share_prompt: neighbours of the same group share their prompt and the tokens that `common_response_prefix`
            counts; neighbours of two groups share those that `common_prompt_prefix` counts.
        routes: include the experts of the trajectories that have them.

    Raises:
        ValueError: neighbours of one group have different prompts, only some trajectories have a column, or a token in
            the loss is not sampled.
    """
    lengths = np.array([len(item.tokens) for item in trajectories], np.int64)
    cu_seqlens = _prefix_sum(lengths)
    group = np.array([item.group for item in trajectories], np.int64)
    lays_prompt, prompt_shared, shared = _shared(trajectories, group, share_prompt)
    segments = _Segments.of(trajectories, lays_prompt, prompt_shared, shared)
    columns = {
        "tokens": _joined(segments.pieces, np.int64),
        "position": segments.position,
        "predict": _predicting(segments, cu_seqlens, shared),
        "target": _joined([item.tokens for item in trajectories], np.int64),
        "temperature": np.repeat(np.array([item.temperature for item in trajectories], np.float32), lengths),
        "cu_seqlens": cu_seqlens,
        "group": group,
        "advantage": _joined([item.advantage for item in trajectories], np.float32),
    }
    for column in _carried():
        if column.dtype == "id":
            if routes:
                columns |= _fed(column, trajectories, lays_prompt, prompt_shared, shared)
        elif column.ragged:
            columns |= _packed_sets(column, trajectories)
        else:
            columns |= _packed(column, trajectories)
    wrong = columns["loss_mask"] & ~columns["sampled"]
    if wrong.any():
        raise ValueError(f"pack: token {wrong.argmax()} of the batch is in the loss but not sampled.")
    if "echo" in columns:
        observed = columns["echo"] > 0
        columns["temperature"] = np.where(observed, np.float32(1), columns["temperature"])
        wrong = observed & columns["sampled"]
        if wrong.any():
            raise ValueError(f"pack: token {wrong.argmax()} of the batch is sampled, so it can't be an observation.")
    given = _on_host(columns)
    given |= {name: torch.from_numpy(array) for name, array in columns.items()}
    return PackedBatch(
        **given,
        tokens_of=tuple(lengths.tolist()),
        sampled_of=_counts(columns["sampled"], cu_seqlens),
        in_loss_of=_counts(columns["loss_mask"], cu_seqlens),
        edges=tuple(segments.cu.tolist()),
        parents=tuple(segments.parent.tolist()),
        responses=tuple(segments.response.tolist()),
        seen=tuple(segments.seen.tolist()),
        completions=_completions(trajectories),
    )


@dataclass(frozen=True, eq=False)
class _Segments:
    """The G segments of S trajectories: for each the unshared rest of its response, after that of its prompt if it lays
    out its prompt.

    pieces: the tokens of each segment. cu: [G+1] the edges of the segments on axis L.
    prompt, response: [S] the segments that end the prompt of each trajectory, and its response.
    parent, seen: [G] see `PackedBatch`.
    """

    pieces: Sequence[NDArray[Any]]
    cu: NDArray[np.int64]
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    parent: NDArray[np.int64]
    seen: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        lays_prompt: NDArray[np.bool_],
        prompt_shared: NDArray[np.int64],
        shared: NDArray[np.int64],
    ) -> "_Segments":
        """The segments, given what `_shared` returns."""
        pieces: list[NDArray[Any]] = []
        for item, own_prompt, begin, start in zip(trajectories, lays_prompt, prompt_shared, shared, strict=True):
            if own_prompt:
                pieces.append(item.prompt_tokens[begin:])
            pieces.append(item.tokens[start:-1])
        response = np.cumsum(1 + lays_prompt) - 1
        prompt = (response - 1)[lays_prompt][np.cumsum(lays_prompt) - 1]

        parent = np.full(len(pieces), -1, np.int64)
        parent[response] = np.where(shared > 0, np.roll(response, 1), prompt)
        parent[prompt[prompt_shared > 0]] = np.roll(prompt, 1)[prompt_shared > 0]

        seen = np.zeros(len(pieces), np.int64)
        seen[prompt[lays_prompt]] = prompt_shared[lays_prompt]
        seen[response] = shared + [len(item.prompt_tokens) for item in trajectories]

        cu = _prefix_sum(np.array([len(piece) for piece in pieces], np.int64))
        return cls(pieces, cu, prompt, response, parent, seen)

    @property
    def position(self) -> NDArray[np.int64]:
        """[L] the position of each token in its own sequence."""
        starts = self.cu[:-1]
        return np.arange(self.cu[-1]) - np.repeat(starts - self.seen, np.diff(self.cu))


def _predicting(segments: _Segments, cu_seqlens: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] the index in L where each response token is predicted: token t at t - 1 of its segment, token 0 at the end of
    its prompt, and the `shared` [S] first ones where the neighbour predicts them."""
    lengths = np.diff(cu_seqlens)
    starts = cu_seqlens[:-1]
    shift = segments.cu[segments.response] - 1 - shared - starts
    predict: NDArray[np.int64] = np.arange(cu_seqlens[-1]) + np.repeat(shift, lengths)
    ends_of_prompts = segments.cu[segments.prompt + 1]
    predict[starts[lengths > 0]] = ends_of_prompts[lengths > 0] - 1
    for i in shared.nonzero()[0]:  # in order: the neighbour's entries may be copies too
        count = shared[i] + 1
        own = starts[i]
        neighbour = starts[i - 1]
        predict[own : own + count] = predict[neighbour : neighbour + count]
    return predict


def _counts(mask: NDArray[np.bool_], cu_seqlens: NDArray[np.int64]) -> tuple[int, ...]:
    """The number of marked tokens of each sequence."""
    marked_before = _prefix_sum(mask)
    return tuple(np.diff(marked_before[cu_seqlens]).tolist())


def _on_host(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The fields of a `PackedBatch` that repeat on the host what some columns say, of the columns that there are."""
    facts: dict[str, Any] = {}
    if "sampling_mask_cu" in columns:
        facts["sampling_mask_edges"] = tuple(columns["sampling_mask_cu"].tolist())
    if "echo" in columns:
        facts["echo_tokens"] = int((columns["echo"] > 0).sum())
    if "policy_version" in columns:
        facts["newest_version"] = int(columns["policy_version"].max(initial=-1))
    return facts


def _completions(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """The numbers of the trajectories that begin a completion, and their count. A neighbour with the same group and
    sample, and a later turn, is another path of the same completion."""
    starts = [0] if trajectories else []
    for number, (before, item) in enumerate(pairwise(trajectories), 1):
        same = (before.uid, before.group, before.sample) == (item.uid, item.group, item.sample)
        if not (same and item.turn > before.turn):
            starts.append(number)
    return (*starts, len(trajectories))


def _first_tokens(spans: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The spans cut off after `count` tokens."""
    out: list[tuple[int, int]] = []
    for start, end in spans:
        if count <= 0:
            break
        out.append((start, min(end, start + count)))
        count -= end - start
    return out


def indices_of(spans: Sequence[tuple[int, int]]) -> Tensor:
    """[T] the indices in these spans, in order."""
    parts = [torch.arange(start, end) for start, end in spans]
    return torch.cat([torch.arange(0), *parts])


def _shared(
    trajectories: Sequence[Trajectory], group: NDArray[np.int64], share_prompt: bool
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """[S] True for trajectories that lay out their prompt: the first of a group, or all without `share_prompt`; [S]
    their `common_prompt_prefix`; [S] the `common_response_prefix` of the others."""
    lays_prompt = np.append(True, group[1:] != group[:-1])[: len(group)]
    prompt_shared = np.zeros(len(group), np.int64)
    shared = np.zeros(len(group), np.int64)
    last_laid = 0  # index of the trajectory whose prompt was laid out last, with its routes
    for i, (before, item) in enumerate(pairwise(trajectories), 1):
        if lays_prompt[i]:
            prompt_shared[i] = common_prompt_prefix(trajectories[last_laid], item)
            last_laid = i
            continue
        if not np.array_equal(before.prompt_tokens, item.prompt_tokens):
            raise ValueError(f"pack: group {item.group} mixes prompts; each prompt needs its own group number.")
        shared[i] = common_response_prefix(before, item)
    if not share_prompt:
        lays_prompt[:] = True
        prompt_shared[:] = 0
        shared[:] = 0
    return lays_prompt, prompt_shared, shared


@cache
def _carried() -> list[TokenColumn]:
    """The columns of both `Trajectory` and `PackedBatch`, except those that `pack` always sets."""
    shared = {f.name for f in fields(Trajectory)} & {f.name for f in fields(PackedBatch)} - {"tokens", "advantage"}
    return [column for column in TOKEN_COLUMNS.values() if column.name in shared]


def _packed(column: TokenColumn, trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """A column joined along axis N if the trajectories have it; a mask that is None is all True."""
    if column.dtype == "bool":
        masks = [_full_mask(item, column) for item in trajectories]
        return {column.name: _joined(masks, np.bool_)}

    values = [getattr(item, column.name) for item in trajectories]
    present = [value is not None for value in values]
    if not any(present):
        return {}
    if not all(present):
        _refuse_missing(column, present.index(False))
    dtype = np.dtype(column.dtype)
    if dtype == np.int32:
        dtype = np.dtype(np.int64)
    return {column.name: _joined(values, dtype)}


def _full_mask(item: Trajectory, column: TokenColumn) -> NDArray[np.bool_]:
    """[T] bool, a mask of the trajectory."""
    mask: NDArray[np.bool_] | None = getattr(item, column.name)
    if mask is None:
        return np.broadcast_to(True, len(item.tokens))
    return mask


def _packed_sets(column: TokenColumn, trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """The joined sets of the trajectories, and their edges; only a trajectory without tokens may lack its sets."""
    sets = [getattr(item, column.name) for item in trajectories]
    if all(part is None for part in sets):
        return {}
    for number, (part, item) in enumerate(zip(sets, trajectories, strict=True)):
        if part is None and len(item.tokens):
            _refuse_missing(column, number)
    joined = SamplingMask.joined([part for part in sets if part is not None])
    return {column.name: joined.ids.astype(np.int64), f"{column.name}_cu": joined.offsets}


def _refuse_missing(column: TokenColumn, number: int) -> NoReturn:
    raise ValueError(f"pack: {column.name} is missing from trajectory {number} and present in others.")


def _fed(
    column: TokenColumn,
    trajectories: Sequence[Trajectory],
    lays_prompt: NDArray[np.bool_],
    prompt_shared: NDArray[np.int64],
    shared: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """A column of every token that is fed, axis L, with `absent` for trajectories that lack it. Trajectories marked in
    `lays_prompt` [S] lay out their prompt without its first `prompt_shared` [S] tokens; all lay out their response
    without its first `shared` [S] tokens. A response token is fed where the next one is predicted."""
    responses = [getattr(item, column.name) for item in trajectories]
    known = [values for values in responses if values is not None]
    if not known:
        return {}
    unknown = np.full(known[0].shape[1:], column.absent, np.result_type(*known))  # of one token
    pieces: list[NDArray[Any]] = []
    for item, response, own_prompt, begin, start in zip(
        trajectories, responses, lays_prompt, prompt_shared, shared, strict=True
    ):
        if own_prompt:
            prompt = getattr(item, f"prompt_{column.name}")
            pieces.append(_from(begin, prompt, len(item.prompt_tokens), unknown))
        pieces.append(_from(start + 1, response, len(item.tokens), unknown))
    return {column.name: np.concatenate(pieces)}


def _from(start: int, values: NDArray[Any] | None, length: int, unknown: NDArray[Any]) -> NDArray[Any]:
    """The values of the tokens from `start` on, of a column of `length` tokens; each is `unknown` if it is None."""
    if values is not None:
        return values[start:]
    return np.broadcast_to(unknown, (max(0, length - start), *unknown.shape))


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    filled = [part for part in parts if len(part)]
    if filled:
        return np.concatenate(filled, dtype=dtype, casting="same_kind")
    of_token = parts[0].shape[1:] if parts else ()
    return np.empty((0, *of_token), dtype)


def _prefix_sum(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])


def common_response_prefix(before: Trajectory, item: Trajectory) -> int:
    """Count the leading tokens that are equal in two responses and go to the same experts; 0 if fewer than
    `LEAST_SHARED`, or if the responses are not paths of episodes. A response's last token, which is not fed, does not
    count."""
    if before.sampled is None or item.sampled is None:
        return 0
    length = max(0, min(len(before.tokens), len(item.tokens)) - 1)
    same = before.tokens[:length] == item.tokens[:length]
    count = _agreeing(same, before.routed_experts, item.routed_experts, 1)
    return count if count >= LEAST_SHARED else 0


def common_prompt_prefix(before: Trajectory, item: Trajectory) -> int:
    """Count the leading tokens that are equal in two prompts and go to the same experts, usually a system prompt or
    examples; 0 if fewer than `LEAST_SHARED_PROMPT`. The last token of `item`'s prompt, which predicts the first of its
    response, does not count."""
    length = max(0, min(len(before.prompt_tokens), len(item.prompt_tokens) - 1))
    if length < LEAST_SHARED_PROMPT:
        return 0
    same = before.prompt_tokens[:length] == item.prompt_tokens[:length]
    count = _agreeing(same, before.prompt_routed_experts, item.prompt_routed_experts, 0)
    return count if count >= LEAST_SHARED_PROMPT else 0


def _agreeing(same: NDArray[np.bool_], routes: NDArray[Any] | None, others: NDArray[Any] | None, first: int) -> int:
    """Count the leading tokens that are the `same` and go to the same experts, whose rows start at `first`."""
    if (routes is None) != (others is None):
        return 0
    if routes is not None and others is not None:
        span = slice(first, first + len(same))
        same &= (routes[span] == others[span]).all((1, 2))
    return len(same) if same.all() else int(same.argmin())


def packing_order(items: Sequence[Sequence[Trajectory]]) -> Sequence[int]:
    """The order in which to pack items, each given by its sequences. Only paths of episodes are reordered, so that
    those with the longest common prefixes become neighbours: by group, in order of first appearance, then by tokens."""
    if all(sequence.sampled is None for sequence, *_ in items):
        return range(len(items))
    place_of_group: dict[int, int] = {}
    keys: list[tuple[int, bytes]] = []
    for i, (path, *_) in enumerate(items):
        place = place_of_group.setdefault(path.group, i)
        keys.append((place, path.tokens.tobytes()))
    return sorted(range(len(items)), key=keys.__getitem__)
