"""Tensor parallelism: neighbouring ranks split the matrices of each layer, by the plan that transformers has for the
architecture, and compute the same tokens.

    columns      q, k, v, gate, up     a rank computes some of the outputs: whole heads, a part of the hidden units
    rows         o, down               a rank multiplies its part of the inputs; the products are summed over the ranks
    experts      of an MoE layer       a rank has some of them; their outputs for all tokens are summed
    vocabulary   embedding and head    a rank has some of the rows; for another rank's token it adds 0

Between these the hidden states are whole and the same on every rank, and so are the gradients of norms and routers. The
embedding is split as the head is, so that tied weights stay tied.

Source: arXiv 1909.08053, section 3, over DTensors.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from proxima.data import FieldError, require
from proxima.data.errors import nearest_divisor
from proxima.model.architecture import TextConfig
from proxima.model.masked_logits import PackedSamplingMask
from proxima.model.parallel.experts import split_rows, with_own_rows
from proxima.model.parallel.mesh import add_parts
from proxima.model.parallel.sharding import Sharding, local_part, ranks_for_tensors

FIELD = "placement.tensor_parallel"
UNITS = "units of intermediate_size"


@dataclass(frozen=True)
class VocabularyPart:
    """The rows start … start + size - 1 of the head, on one rank of a group that has them all. Methods marked
    collective are called by each rank, with tensors of the same shape."""

    group: Any
    start: int
    size: int

    @classmethod
    def of(cls, weight: DTensor) -> "VocabularyPart":
        """The part of a head [V, D] that is split over the ranks of a mesh."""
        local, offset = local_part(weight)
        return cls(weight.device_mesh.get_group(), offset[0], len(local))

    def has(self, token: int) -> bool:
        """True if the token belongs to this rank."""
        return self.start <= token < self.start + self.size

    def owned(self, ids: Tensor) -> Tensor:
        """True for the tokens that belong to this rank."""
        return (ids >= self.start) & (ids < self.start + self.size)

    def local(self, ids: Tensor) -> Tensor:
        """The row of each token on this rank; an arbitrary row for a token of another rank."""
        return (ids - self.start).clamp(0, self.size - 1)

    def rows_of(self, target: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`local` of both."""
        if others is not None:
            others = self.local(others)
        return self.local(target), others

    def local_mask(self, mask: PackedSamplingMask) -> PackedSamplingMask:
        """The tokens that could be sampled and belong to this rank."""
        own = self.owned(mask.ids)
        before = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
        return PackedSamplingMask(mask.ids[own] - self.start, before[mask.cu], source=mask)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks; collective."""
        return add_parts(values, self.group)

    def logsumexp(self, values: Tensor) -> Tensor:
        """log Σ exp(value) over the ranks; collective. -inf stands for no value, and some rank must have one."""
        top = values.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return top + self.sum((values - top).exp()).log()

    def values_of(self, ids: Tensor, values: Tensor) -> Tensor:
        """The value of each token, from the rank that has it; collective."""
        return self.sum(values.where(self.owned(ids), 0.0))

    def log_prob(
        self, log_z: Tensor, masked_z: Tensor, log_prob: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine each rank's results for its own tokens: log Z, log Z of the tokens that could be sampled (the same
        tensor where all could), and the log-probs of the targets; collective."""
        every = self.logsumexp(log_z)
        masked = every if masked_z is log_z else self.logsumexp(masked_z)
        return every, masked, self.values_of(target, log_prob + masked_z) - masked

    def entropy(self, entropy: Tensor, log_z: Tensor, whole: Tensor) -> Tensor:
        """H = Σ_r w_r (H_r - log w_r), from each rank's entropy H_r of its own tokens; collective.

        Args:
            log_z, whole: of this rank's tokens, and of all: log w_r = log_z - whole.
        """
        share = log_z - whole
        return self.sum(share.exp() * (entropy - share))

    def largest(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, k] the largest of all ranks' values [N, k], by falling value, and their tokens; collective."""
        top = self._of_all(values).topk(k, dim=1)
        return top.values, self._of_all(ids).gather(1, top.indices)

    def _of_all(self, columns: Tensor) -> Tensor:
        """[N, ranks x k] the columns [N, k] of all ranks, side by side."""
        parts = [torch.empty_like(columns) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, columns.contiguous(), group=self.group)
        return torch.cat(parts, 1)


class _Attention(ParallelStyle):
    """A module whose matrices are split by columns: gradients of its hidden states are summed over the ranks once, not
    once for each matrix."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shared(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            name = "hidden_states"
            states = args[0] if args else given[name]
            whole = DTensor.from_local(states, device_mesh, [Replicate()], run_check=False)
            if args:
                return ((whole, *args[1:]), given)
            return (args, given | {name: whole})

        module.register_forward_pre_hook(shared, with_kwargs=True)
        return module


class _Experts(ParallelStyle):
    """The experts of an MoE layer, some on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_rows(module, device_mesh)
        experts: Any = module
        count = experts.num_experts // device_mesh.size()
        first = count * device_mesh.get_local_rank()
        settings = {"num_experts": count, "_is_expert_parallel": True}  # index `count`: no expert

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            index = top_k_index - first
            index = index.masked_fill((index < 0) | (index >= count), count)
            states = _part_of_gradient(hidden_states, device_mesh)
            weights = _part_of_gradient(top_k_weights, device_mesh)
            return add_parts(with_own_rows(experts, settings, states, index, weights), device_mesh.get_group())

        experts.forward = forward
        return module


class _Embedding(ParallelStyle):
    """The rows of some tokens on each rank. torch's own style forgets which row is for padding and gets no gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_rows(module, device_mesh)
        embedding: Any = module
        part = VocabularyPart.of(embedding.weight)
        padding = embedding.padding_idx
        own_padding = None
        if padding is not None and part.has(padding):
            own_padding = padding - part.start

        def forward(ids: Tensor) -> Tensor:
            states = with_own_rows(embedding, {"padding_idx": own_padding}, part.local(ids))
            return add_parts(states.where(part.owned(ids)[..., None], 0.0), device_mesh.get_group())

        embedding.forward = forward
        return module


class _Head(ParallelStyle):
    """The head's rows of some tokens on each rank, which `proxima.model.log_prob` reads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_rows(module, device_mesh)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # norms of the heads, [1, tokens, heads, size]: a rank has the gradient from its own heads
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "moe_tp_experts": _Experts,
}
"""The styles in transformers' plans → our implementation."""


def check_tensor_parallel(config: Any, sharding: Sharding, ranks: int = 0, *, adapters: bool, name: str) -> None:
    """`check_split` for tensor parallelism."""
    count = sharding.tensor_parallel
    text = config.get_text_config()
    plan = {name: style for name, style in (text.base_model_tp_plan or {}).items() if ".experts." not in name}
    unknown = sorted(set(plan.values()) - STYLES.keys())
    kind = text.model_type
    bound = f"is for architectures with a plan of transformers, and {kind}, of {name}, has none"
    require(bool(plan), FIELD, count, bound, remedy="set it to 1")
    bound = f"can't split {kind}, of {name}, whose plan has {', '.join(unknown)}"
    require(not unknown, FIELD, count, bound, remedy="set it to 1")
    require(
        not adapters, FIELD, count, "can't split a model with adapters", remedy="set it to 1, or model.lora to null"
    )
    parts = _divided(text, plan)
    replicated = sharding.expert_parallel == 1 or "experts" not in parts
    require(replicated, FIELD, count, "splits the experts, and so does expert_parallel", remedy="set one of them to 1")
    legal = nearest_divisor(count, math.gcd(*parts.values(), ranks_for_tensors(sharding, ranks)))
    for what, number in parts.items():
        bound = f"must divide the {number} {what} of {name}"
        require(number % count == 0, FIELD, count, bound, remedy=f"set it to {legal}")
    if ranks and sharding.kind == "full":
        _check_rest(text, count, ranks // count, parts.get(UNITS, 0))


def _divided(config: Any, plan: dict[str, str]) -> dict[str, int]:
    """The quantities that the ranks divide among them, with their sizes."""
    heads = config.num_attention_heads
    text = TextConfig.of(config)
    counts = {"attention heads": heads, "key and value heads": text.key_value_heads or heads}
    if text.experts and "moe_tp_experts" in plan.values():
        counts["experts"] = text.experts
    if not text.experts or text.dense_layers:
        counts[UNITS] = config.intermediate_size
    return counts


def _check_rest(config: Any, count: int, shards: int, units: int) -> None:
    """Raise FieldError if FSDP can split neither rows nor columns of a matrix whose rows a tensor group has split,
    which `fsdp_axis` would detect too late."""
    text = TextConfig.of(config)
    size = text.head_dim or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, text.key_value_heads or config.num_attention_heads)
    rows = [*(number * size for number in heads), units, config.vocab_size]
    even = config.hidden_size % shards == 0 or all(number % (count * shards) == 0 for number in rows)
    bound = f"leaves {shards} ranks to split matrices of {config.hidden_size} columns, which they can't evenly"
    require(even, FIELD, count, bound, remedy="set placement.sharding=hybrid, or start other ranks")


def split_tensors(model: nn.Module, mesh: DeviceMesh, shards: int) -> None:
    """Split a model in place over the ranks of `mesh`; its weights may be on the meta device. Each rank must hold the
    same weights; nothing is sent. `shards`: the number of ranks over which FSDP will split the rest."""
    untyped: Any = model
    plan = dict[re.Pattern[str], str]()
    for name, style in untyped.tp_plan.items():
        pattern = name.replace(".", r"\.").replace("*", r"\d+")
        plan[re.compile(pattern)] = style
    styles = dict[str, ParallelStyle]()
    biases = dict[str, nn.Parameter]()
    embedding = untyped.get_input_embeddings()
    head = untyped.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        if module is embedding:
            styles[name] = _Embedding()
            continue
        if module is head:
            styles[name] = _Head()
            continue
        planned = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if planned is None:
            continue
        styles[name] = STYLES[planned]()
        if planned == "colwise":
            styles.setdefault(name.rpartition(".")[0], _Attention())
            bias: Any = module.bias
            if bias is not None and len(bias) % (mesh.size() * shards):
                biases[name] = bias
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for name, bias in biases.items():  # as a vector it has no other dimension for FSDP, see `fsdp_axis`
        copied = distribute_tensor(bias, mesh, [Replicate()], src_data_rank=None)
        model.get_submodule(name).bias = nn.Parameter(copied, requires_grad=bias.requires_grad)
    if tied:
        head.weight = embedding.weight


def fsdp_axis(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Choose the dimension in which FSDP splits a parameter whose rows are already split: the rows if they divide
    evenly, else another, because DTensor assigns strided rows that do not divide evenly to the wrong ranks.

    Raises:
        FieldError: no dimension divides evenly.
    """

    def axis(parameter: nn.Parameter) -> Shard | None:
        if shards == 1 or not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
            return None
        rows = parameter.shape[0]
        ranks = parameter.device_mesh.size()
        if rows % (ranks * shards) == 0:
            return None
        other = next((d for d in range(1, parameter.ndim) if parameter.shape[d] % shards == 0), None)
        if other is None:
            bound = f"leaves {shards} ranks to split weights of {list(parameter.shape)}, which they can't evenly"
            raise FieldError(FIELD, ranks, bound, remedy="set placement.sharding=hybrid, or start other ranks")
        return Shard(other)

    return axis


def _part_of_gradient(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor itself; each rank has a part of its gradient, and the backward pass sums the parts."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
