"""The batch that every surrogate, correction and aggregation reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from proxima.data.field_checks import check_fields, check_names, check_shape, tensor_hints
from proxima.data.transfer import to_device

# The fields that depend on the current policy, and carry its gradient; every other tensor of a batch is data.
GRADIENT = frozenset({"log_prob", "entropy", "top_k_log_prob", "bucket_log_prob"})
LOG_ZERO = -1e15  # nats: what a log-prob of -inf counts as; its square is finite in float32


def finite_log_prob(value: Tensor) -> Tensor:
    """Replace −inf, the log-prob of an excluded token, by −1e15 nats without a gradient: the log-ratio of two policies
    that both exclude it is then 0, not NaN. NaN and +inf, which no policy gives, are unchanged."""
    return value.clamp(min=LOG_ZERO)


@dataclass(frozen=True, eq=False)
class HostCounts:
    """Counts of a batch's sequences on the host, which save a device sync.

    Args:
        tokens, sampled, in_loss: the number of each per sequence; `in_loss` is None if only the device knows it.
        edges, sampled_mask, loss_mask: the tensors `cu_seqlens`, `sampled` and `loss_mask` that were counted; a batch
            with other tensors is validated again.
    """

    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    in_loss: tuple[int, ...] | None
    edges: Tensor
    sampled_mask: Tensor
    loss_mask: Tensor

    def describes(self, b: "PolicyBatch") -> bool:
        return self.edges is b.cu_seqlens and self.sampled_mask is b.sampled and self.loss_mask is b.loss_mask


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """Response tokens of S sequences on one packed axis of N; there is no padding.

    Construction reads `cu_seqlens` and the masks from the device once. `dataclasses.replace` of other fields does not
    wait for the device, nor do `policy_loss` and the specs of `core.surrogate`.

    Gradients flow into `log_prob`, and into `entropy`, `top_k_log_prob` and `bucket_log_prob` where a spec reads them.
    All other tensors are detached at construction, so no loss moves an advantage, a centre, a reference or a teacher
    that a model computed with a gradient.

    Args:
        log_prob: [N] float, nats, current policy π at the sampling temperature; carries the gradient.
        loss_mask: [N] bool, the token enters the loss. Implies `sampled`.
        cu_seqlens: [S+1] int, 0 … N ascending; sequence s is `cu_seqlens[s]:cu_seqlens[s+1]`. A sequence may be empty.
        advantage: [N] float, reward units. Any value, NaN included, outside the loss.
        behavior_log_prob: [N] float, nats, policy μ that sampled the token; any value where `sampled` is False.
        proximal_log_prob: [N] float, nats, centre of the trust region π_prox. Omitted: the behavior policy (`proximal:
            behavior`).
        next_log_prob: [N] float, nats, the version right after the one that sampled the token; NaN where it is
            unknown, which rejects the token for corrections that read it.
        reference_log_prob: [N] float, nats, frozen reference policy.
        sampled: [N] bool, the policy chose the token (tool and environment tokens: False). Omitted: all True.
        policy_version: [N] int, version that sampled the token.
        entropy: [N] float, nats, of the current policy at the position; carries a gradient if requested.
        token: [N] int, id of the token.
        top_k: [N, K] int, ids of the behavior policy's most probable tokens, with `behavior_top_k_log_prob` and
            `top_k_log_prob` [N, K] float, nats, their log-probs under μ and, with gradient, under π.
        top_k_divergence: [N] float, the surrogate's divergence if already measured; it replaces the three `top_k`
            fields above.
        teacher_log_prob: [N] float, nats, of the teacher from which the policy is distilled.
        bucket_log_prob, teacher_bucket_log_prob: [N, J] float, nats, of the tokens that each have their own bucket in
            the divergence from the teacher: under π, with gradient, and under the teacher.
        selected: [N] bool, the tokens that a surrogate selected over the whole optimizer batch, see
            `proxima.core.precompute`.
        weight: [N] float, the weights of the corrections, computed over the whole optimizer batch; 0 where rejected.
            See `proxima.core.precompute`.
        group: [S] int, the same number for completions of one prompt. Omitted: each sequence has its own group.
        host_counts: `HostCounts` of a batch that was validated on the host. Omitted: read from the device.

    Raises:
        ValueError: names the field, its shape or dtype, what was expected and which field set it.
    """

    log_prob: Annotated[Tensor, "float N"]
    loss_mask: Annotated[Tensor, "bool N"]
    cu_seqlens: Annotated[Tensor, "int S+1"]
    advantage: Annotated[Tensor | None, "float N"] = None
    behavior_log_prob: Annotated[Tensor | None, "float N"] = None
    proximal_log_prob: Annotated[Tensor | None, "float N"] = None
    next_log_prob: Annotated[Tensor | None, "float N"] = None
    reference_log_prob: Annotated[Tensor | None, "float N"] = None
    sampled: Annotated[Tensor | None, "bool N"] = None
    policy_version: Annotated[Tensor | None, "int N"] = None
    entropy: Annotated[Tensor | None, "float N"] = None
    token: Annotated[Tensor | None, "int N"] = None
    top_k: Annotated[Tensor | None, "int N K"] = None
    top_k_log_prob: Annotated[Tensor | None, "float N K"] = None
    behavior_top_k_log_prob: Annotated[Tensor | None, "float N K"] = None
    top_k_divergence: Annotated[Tensor | None, "float N"] = None
    teacher_log_prob: Annotated[Tensor | None, "float N"] = None
    bucket_log_prob: Annotated[Tensor | None, "float N J"] = None
    teacher_bucket_log_prob: Annotated[Tensor | None, "float N J"] = None
    selected: Annotated[Tensor | None, "bool N"] = None
    weight: Annotated[Tensor | None, "float N"] = None
    group: Annotated[Tensor | None, "int S"] = None
    host_counts: Any = field(default=None, repr=False, compare=False)  # HostCounts | None; see `counts`

    def __post_init__(self) -> None:
        sizes = check_fields(self, GRADIENT)
        put = object.__setattr__
        if self.proximal_log_prob is None and self.behavior_log_prob is not None:
            put(self, "proximal_log_prob", self.behavior_log_prob)
        if self.sampled is None:
            put(self, "sampled", torch.ones_like(self.loss_mask))
        if self.group is None:
            put(self, "group", torch.arange(sizes["S"], device=self.loss_mask.device))
        if self.host_counts is None or not self.host_counts.describes(self):
            put(self, "host_counts", self._counted(sizes["N"]))

    def _counted(self, tokens: int) -> HostCounts:
        """Validate edges and masks; this takes two device syncs."""
        cut: list[int] = self.cu_seqlens.tolist()
        lengths = tuple(end - start for start, end in pairwise(cut))
        if not cut or cut[0] != 0 or cut[-1] != tokens or min(lengths, default=0) < 0:
            raise ValueError(f"PolicyBatch.cu_seqlens: {cut[:8]}, expected 0 … N = {tokens}, ascending.")
        assert self.sampled is not None
        running = torch.stack([self.sampled, self.loss_mask]).cumsum(1)
        before = torch.cat([running.new_zeros(2, 1), running], 1)  # of each token and of the end
        of_sequences = before[:, self.cu_seqlens.long()].diff().flatten()
        not_sampled = self.loss_mask & ~self.sampled
        *counts, wrong = torch.cat([of_sequences, not_sampled.sum()[None]]).tolist()
        if wrong:
            at = int(not_sampled.nonzero()[0])
            token = f"token {at} is in the loss but not sampled: no policy chose it"
            raise ValueError(f"PolicyBatch.loss_mask: {token}. Mask it, or mark it sampled.")
        sampled = tuple(counts[: len(lengths)])
        in_loss = tuple(counts[len(lengths) :])
        return HostCounts(lengths, sampled, in_loss, self.cu_seqlens, self.sampled, self.loss_mask)

    @property
    def counts(self) -> HostCounts:
        """`host_counts`, which every batch has."""
        counts: HostCounts = self.host_counts
        return counts

    def with_loss_mask(self, loss_mask: Tensor) -> "PolicyBatch":
        """The batch with `loss_mask` [N] bool, a subset of the current one; it is not validated."""
        return replace(self, loss_mask=loss_mask, host_counts=replace(self.counts, in_loss=None, loss_mask=loss_mask))

    def __len__(self) -> int:
        return len(self.log_prob)

    @property
    def sequences(self) -> int:
        """S, the number of sequences, empty ones included."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> Tensor:
        """[S] int, tokens of each sequence."""
        return self.cu_seqlens.diff()

    @cached_property
    def sequence_index(self) -> Tensor:
        """[N] int64, the sequence of each token."""
        index = torch.arange(self.sequences, device=self.lengths.device)
        return torch.repeat_interleave(index, self.lengths, output_size=len(self))

    def masked(self, name: str, fill: float = 0.0) -> Tensor:
        """A field [N, …] with `fill` outside the loss mask, by selection, so that NaN there reaches no value and no
        gradient. Detached unless it is in `GRADIENT`; log-probs pass through `finite_log_prob`. ValueError if it is
        None."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"PolicyBatch.{name} is missing.")
        if name not in GRADIENT:
            value = value.detach()
        outside = torch.full((), fill, dtype=value.dtype, device=value.device)
        value = torch.where(self.loss_mask, value, outside)
        if name.endswith("log_prob"):
            return finite_log_prob(value)
        return value

    def take(self, order: Sequence[int] | Tensor) -> "PolicyBatch":
        """The batch with the sequences of these indices, in this order: a permutation, a selection, or a
        micro-batch."""
        rows: list[int]
        if isinstance(order, Tensor):
            rows = order.tolist()
        else:
            rows = list(order)
        counts = self.counts
        kept = tuple(counts.tokens[row] for row in rows)
        sampled = tuple(counts.sampled[row] for row in rows)
        in_loss = None
        if counts.in_loss is not None:
            in_loss = tuple(counts.in_loss[row] for row in rows)
        order = to_device(torch.as_tensor(order, dtype=torch.long), self.cu_seqlens.device)
        lengths = self.lengths[order]
        cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        starts = torch.repeat_interleave(self.cu_seqlens[:-1][order] - cut[:-1], lengths, output_size=sum(kept))
        tokens = starts + torch.arange(sum(kept), device=starts.device)
        assert self.group is not None
        columns: dict[str, Any] = {"cu_seqlens": cut.to(self.cu_seqlens.dtype), "group": self.group[order]}
        columns |= {name: value[tokens] for name, value in self.token_fields().items()}
        counted = HostCounts(kept, sampled, in_loss, columns["cu_seqlens"], columns["sampled"], columns["loss_mask"])
        return replace(self, **columns, host_counts=counted)

    @classmethod
    def cat(cls, parts: Sequence["PolicyBatch"]) -> "PolicyBatch":
        """The sequences of all parts, in order; each field must be in all of them or in none."""
        lengths = torch.cat([part.lengths for part in parts])
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].token_fields()}
        group = torch.cat([part.group for part in parts if part.group is not None])
        cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        counts = [part.counts for part in parts]
        in_loss = None
        known = [each.in_loss for each in counts if each.in_loss is not None]
        if len(known) == len(counts):
            in_loss = tuple(chain.from_iterable(known))
        counted = HostCounts(
            tokens=tuple(chain.from_iterable(each.tokens for each in counts)),
            sampled=tuple(chain.from_iterable(each.sampled for each in counts)),
            in_loss=in_loss,
            edges=cut,
            sampled_mask=joined["sampled"],
            loss_mask=joined["loss_mask"],
        )
        return cls(cu_seqlens=cut, group=group, host_counts=counted, **joined)

    def token_fields(self) -> dict[str, Tensor]:
        """The fields with a value for each token, by name, without those that are None."""
        columns: dict[str, Tensor] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor) and each.name not in ("cu_seqlens", "group"):
                columns[each.name] = value
        return columns

    @classmethod
    def from_padded(cls, mask: Tensor, **tensors: Tensor) -> "PolicyBatch":
        """Pack right-padded sequences, as other frameworks hold them.

        Args:
            mask: [B, T], bool or 0/1 of any dtype: the loss mask. A False inside a sequence is a token that is not in
                the loss; padding is everything after the last True, or the last True of `sampled` when that is given.
            tensors: any field of the batch as [B, T] (`[B, T, K]` for top-k); `advantage` also as [B]; `group` as [B].

        Returns: a batch with S = B sequences; a row that is all False is an empty sequence.
        Raises: ValueError naming a field that does not exist (with the nearest name), is missing, or has a wrong shape
            (with the field that set the expected one) or dtype.

        Differs: a False inside a sequence is a token that was not sampled, unless `sampled` is given; peers do not
            distinguish the two.
        """
        return cls(**without_padding(cls, mask, tensors))

    def to_padded(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N, …] token values as [S, longest, …] rows, right-padded with `fill`; the inverse of `from_padded`."""
        width = max(self.counts.tokens, default=0)
        out = values.new_full((self.sequences, width, *values.shape[1:]), fill)
        column = torch.arange(len(self), device=values.device) - self.cu_seqlens[:-1][self.sequence_index]
        out[self.sequence_index, column] = values
        return out


def without_padding(cls: type, mask: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of a `PolicyBatch` (`cls`) from padded ones; arguments and errors as those of its `from_padded`."""
    check_names(cls, tensors, "from_padded", without=("loss_mask", "cu_seqlens", "host_counts"))
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in {"mask": mask, **tensors}.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"from_padded.{name}: got {type(value).__name__}, expected a tensor.")
        _, _, *further = tensor_hints(cls).get(name, "bool N").split()
        axes = ["B", "T", *further]
        if name == "group" or (name == "advantage" and value.dim() == 1):
            axes = ["B"]
        check_shape(f"from_padded.{name}", value, axes, sizes)
    loss_mask = _as_bool(mask, "mask")
    rows, width = loss_mask.shape
    sampled = loss_mask
    if "sampled" in tensors:
        sampled = _as_bool(tensors.pop("sampled"), "sampled")
    column = torch.arange(1, width + 1, device=mask.device)
    lengths = column.new_zeros(rows)
    if width:
        lengths = ((sampled | loss_mask) * column).amax(dim=1)
    inside = column <= lengths[:, None]
    packed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name == "group":
            packed[name] = value
            continue
        if name == "advantage" and value.dim() == 1:
            value = value[:, None].expand(rows, width)
        packed[name] = value[inside]
    cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"loss_mask": loss_mask[inside], "sampled": sampled[inside], "cu_seqlens": cut, **packed}


def _as_bool(mask: Tensor, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"from_padded: {name} holds values other than 0 and 1.")
    return mask != 0
