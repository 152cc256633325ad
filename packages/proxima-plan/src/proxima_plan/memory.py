"""The memory of one device in closed form: what a rank trains with, and the weights and KV cache of an engine.

It adds up what autograd and FSDP keep of a Llama-like decoder at the peak, the loss of an update's last micro-batch.
`rehearsal` counts the same tensor by tensor, and a benchmark compares both with processes that train
(`benchmarks/rank_memory`).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proxima.config.sections.model import ModelConfig
from proxima.engine.local.decoder import padded_rows
from proxima.engine.local.kv_cache import ROUND
from proxima.model.log_prob import ROWS_ON_CPU, rows_of_logits
from proxima_plan.devices import CPU, GIB, DeviceKind
from proxima_plan.layout import DeviceLayout, key_parts
from proxima_plan.model_size import ModelFacts
from proxima_plan.step_load import BYTES, Load
from proxima_plan.traffic import BUCKET, FULL, HALF, PROBE

CONTEXT = GIB  # of the driver and its kernels or, on a CPU, of Python and torch
FRAGMENTED = 0.05  # of the allocated bytes: blocks that the allocator can't reuse
WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
FROZEN = "frozen models"
COMPUTES = "activations and graphs"  # of an engine, as the next two
CACHE = "KV cache"
SPARE = "spare cache"
STEADY = (WEIGHTS, GRADIENTS, OPTIMIZER, FROZEN)  # memory that a trainer holds while engines generate
MARGIN = 0.05  # of a device that a proposal leaves free: the formula has been that far below what an allocator holds
ROOM = 0.9  # most of a device that a plan gives a server
MOST_RUNNING = 1024  # completions of an engine without a limit
STARTED = GIB // 2  # what a device that computes nothing yet has taken, of which a server gets no share
GRAPHS = GIB  # of the CUDA graphs of a server, assumed
SAMPLED = 10  # bytes of a logit while a server samples: in bfloat16, in float32, and its log-prob
LARGE = 70  # GiB of a device from which on vLLM's tokens of a step and completions at once are MANY, below FEW
MANY = (8192, 1024)
FEW = (2048, 256)
LAYERS_AT_ONCE = 3  # the one that computes, the next one, and the buffer that it is gathered in


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Args:
        trainer: bytes of a rank, by kind. engine: bytes of an engine's device, by kind.
        slots: completions that an engine runs at once; 0: there is no room for the longest one.
        share: of a device that a server gets; 0: an engine in the process, or on a CPU.
        server: bytes that a server takes of a device when it starts.
        least: bytes without which it does not start: weights, what computes, and the cache of its longest sequence.
        room: bytes that the others on the device leave it.
        needed: bytes of the device that needs the most.
        memory: capacity of a device.
        host: bytes of host memory that a rank's offloaded states take.
        source: `formula` or `rehearsal`, the source of the trainer's bytes.
    """

    trainer: dict[str, int]
    engine: dict[str, int]
    slots: int
    needed: int
    memory: int
    host: int = 0
    source: str = "formula"
    share: float = 0.0
    server: int = 0
    least: int = 0
    room: int = 0

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory and self.starts and (self.slots > 0 or not self.engine)

    @property
    def roomy(self) -> bool:
        """True if it fits and leaves `MARGIN` of the device free."""
        return self.fits and self.needed <= (1 - MARGIN) * self.memory

    @property
    def starts(self) -> bool:
        """True if the servers start, or there are none."""
        return self.least <= self.server <= self.room

    @property
    def best_share(self) -> float:
        """The largest share of a device, in hundredths, with which the servers start and leave `MARGIN` of it free; 0:
        there is none."""
        room = self.room / self.memory - MARGIN
        share = min(math.floor(100 * ROOM), math.floor(100 * room)) / 100
        if share * self.memory < self.least:
            return 0.0
        return share


def trainer_memory(
    spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, load: Load, *, fused: bool = False
) -> tuple[dict[str, int], int]:
    """Return the bytes of a rank by kind, and those of host memory that its offloaded states take. `fused`: the forward
    is `model.fused`."""
    update = load.trained * (load.mean + load.prompt_tokens) * load.passes / load.updates / layout.shares
    tokens = max(min(load.micro_tokens, math.ceil(update)), load.prompt + load.longest)
    alone = update <= tokens  # the update has no other micro-batch: gradients come as activations go
    own = math.ceil(tokens / layout.sharding.context_parallel)
    activations = _activations(spec, model, layout, own, fused=fused)
    kinds = _states(spec, model, layout, load.optimizer, alone=alone)
    if load.critic is not None:  # trained whole, in turns with the policy
        whole = replace(spec, lora=None)
        others = _states(whole, load.critic, layout, load.critic_optimizer, alone=False)
        kinds = {kind: size + others[kind] for kind, size in kinds.items()}
        activations = max(activations, _activations(whole, load.critic, layout, own, fused=fused))
    kinds[FROZEN] = load.frozen * BYTES[spec.dtype] // layout.parts
    host = 0
    if layout.sharding.offload:
        host = sum(kinds.values())
        kinds = {}
    elif getattr(load.optimizer, "offload", False):
        host = kinds.pop(OPTIMIZER)
    if alone:
        kinds[GRADIENTS] = max(0, kinds.get(GRADIENTS, 0) - activations)
    kinds[ACTIVATIONS] = activations
    return {kind: size for kind, size in kinds.items() if size}, host


def _states(
    spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, optimizer: Any, *, alone: bool
) -> dict[str, int]:
    """The bytes of weights, gradients and the optimizer's state. `alone`: of an update with one micro-batch."""
    if spec.lora is not None:
        trained = model.adapter or 0
        whole = trained
        element = 4
    else:
        trained = model.parameters
        whole = layout.local(model).parameters
        element = BYTES[spec.dtype]
    gradients = trained * element // layout.parts
    if layout.ranks > 1 and not (layout.sharding.splits_gradients or alone):  # whole until they are added up
        gradients = 4 * whole
    weights = model.parameters * BYTES[spec.dtype] + (model.adapter or 0) * 4
    moments = _moments(spec, model, optimizer) // layout.parts
    return {WEIGHTS: weights // layout.parts, GRADIENTS: gradients, OPTIMIZER: moments}


def _moments(spec: ModelConfig, model: ModelFacts, optimizer: Any) -> int:
    """The bytes of the optimizer's state for the whole model: AdamW's, unless the optimizer says other ones."""
    if spec.lora is not None:
        return 8 * (model.adapter or 0)
    if not hasattr(optimizer, "moments"):
        return 8 * model.parameters
    layer = model.layer
    if model.experts:  # weights outside the experts: queries, keys, values and output
        layer = 2 * model.hidden * (model.query_width + model.kv_width)
    matrices = model.layers * layer
    return sum(optimizer.moments(matrices, model.parameters - matrices))


def _activations(spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, tokens: int, *, fused: bool) -> int:
    """The bytes that exist only during an update: what layers keep for the backward pass, gathered layers, rounded
    weights, and a chunk of logits."""
    own = layout.local(model)
    sharded = layout.sharded
    sharding = layout.sharding
    compute = BYTES[spec.compute_dtype]
    gathered = BYTES[spec.dtype]
    if sharded and sharding.param_dtype == "bfloat16":
        gathered = 2
    states = tokens * gathered * model.hidden
    layer = _of_layer(spec, own, tokens, gathered, fused=fused)
    size = own.layers * layer + 4 * states  # embeddings, the last norm, and the states that predict
    if spec.gradient_checkpointing:
        size = layer + (own.layers + 4) * states + own.layers * tokens * compute * model.hidden * fused
    kept = 0
    if compute != gathered:  # autocast keeps a rounded copy of each layer, or of one at a time
        at_a_time = spec.gradient_checkpointing and (sharded or fused)
        copies = 1 if at_a_time else own.layers
        kept += own.layer * compute * copies
    if sharded and sharding.reshard_after_forward:  # only what is outside the layers
        kept += gathered * max(0, own.parameters - own.layers * own.layer)
    elif sharded:
        kept += gathered * own.parameters
    # in the backward pass of a layer: gradients in flight, that of the head, whole layers, and sums of gradients
    passing = tokens * (2 * compute * own.intermediate + 2 * gathered * model.hidden)
    if spec.lora is None:
        passing += own.vocabulary * model.hidden * gathered
    if sharded:
        at_once = LAYERS_AT_ONCE if sharding.reshard_after_forward else 1
        passing += at_once * own.layer * gathered
    if sharded and spec.lora is None:
        passing += max(0, own.layer * (gathered + 4) - layer)
    logits = _logits(spec, own, tokens, gathered, compute)
    return size + kept + max(passing, logits)  # the two are never alive together


def _of_layer(spec: ModelConfig, model: ModelFacts, tokens: int, residual: int, *, fused: bool) -> int:
    """The bytes that one layer keeps, without checkpointing or while it is recomputed."""
    h = model.hidden
    i = model.intermediate
    e = BYTES[spec.compute_dtype]
    queries = model.query_width
    if fused:  # two sums and their norms; q, k, v; the output of attention; gate and up
        return tokens * (2 * (residual + e) * h + e * (2 * queries + 2 * model.kv_width + 2 * i))
    norms = 2 * (4 + residual) * h  # the input in float32, and divided by its norm
    rounded = 5 if e < residual else 2  # autocast rounds one for each of q, k, v, gate and up
    inputs = rounded * e * h
    attention = 5 * e * queries  # queries, keys and values for each head, the output, and it in token order
    of_heads = 0
    if model.normed:
        of_heads = (4 + e) * (queries + model.kv_width)
    return tokens * (norms + inputs + attention + of_heads + 4 * e * i + 2 * e * model.experts * h)


def _logits(spec: ModelConfig, model: ModelFacts, tokens: int, element: int, compute: int) -> int:
    """The rounded head, and the larger of two: a chunk of logits with its softmax; or a chunk of their gradient with
    that of the head, which grows chunk by chunk, in float32."""
    rows = spec.log_prob_chunk or ROWS_ON_CPU
    chunk = min(rows, tokens) * model.vocabulary
    head = model.vocabulary * model.hidden
    rounded = head * compute if compute != element else 0
    summed = element if tokens <= rows else 4
    whole = 0 if spec.lora is not None else head
    added = chunk * compute + whole * (compute + summed)  # a chunk's product with the sum, when its softmax is gone
    return rounded + max(chunk * (compute + 8), chunk * (compute + 4) + whole * (compute + element), added)


def with_rows(spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, device: DeviceKind) -> ModelConfig:
    """The settings of a model with the rows of logits that a GPU's memory allows, where they leave these open."""
    if spec.log_prob_chunk is not None or device.name == CPU:
        return spec
    return replace(spec, log_prob_chunk=rows_of_logits(int(device.memory * GIB), layout.local(model).vocabulary))


def sync_memory(spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, *, first: bool) -> int:
    """Return the bytes of a rank, beside what it holds while engines generate, in which new weights go to servers: two
    buckets of the served dtype, and a pass over the probe. The first also has the gradient of its part of the weights,
    along which it moves them.
    """
    buckets = 2 * min(BUCKET, HALF * model.parameters)
    probing = replace(spec, gradient_checkpointing=True, lora=None)
    passing = _activations(probing, model, layout, PROBE, fused=False)
    gradient = FULL * model.parameters // layout.parts
    return buckets + passing + gradient * first


def device_memory(
    spec: ModelConfig,
    model: ModelFacts,
    layout: DeviceLayout,
    load: Load,
    device: DeviceKind,
    counted: Mapping[str, int] | None = None,
) -> DeviceMemory:
    """Return the memory of a layout. `counted`: bytes of a rank from a rehearsal, which replace the formula."""
    estimated, host = trainer_memory(with_rows(spec, model, layout, device), model, layout, load, fused=device.fused)
    rank = dict(counted or estimated)
    total = int(device.memory * GIB)
    source = "formula" if counted is None else "rehearsal"
    training = CONTEXT + math.ceil(sum(rank.values()) * (1 + FRAGMENTED)) + load.beside
    memory = DeviceMemory(rank, {}, 0, training, total, host, source)
    if not load.generates:
        return memory
    if layout.in_process:
        return _with_engine_in_process(memory, model, load)
    asleep = layout.colocated and not layout.awake
    memory = replace(memory, needed=training + CONTEXT * asleep)
    if not layout.colocated:
        taken = STARTED
    elif asleep:
        held = sum(rank.get(kind, 0) for kind in STEADY)
        taken = CONTEXT + math.ceil(held * (1 + FRAGMENTED)) + load.beside
    else:
        taken = training
    memory = _with_servers(memory, model, layout, load, device, taken)
    return replace(memory, host=host + memory.engine[WEIGHTS] * asleep)


def _with_engine_in_process(memory: DeviceMemory, model: ModelFacts, load: Load) -> DeviceMemory:
    """Add the weights and the cache of an engine in the process, which stay while the ranks compute: the cache has a
    row of the longest sequence for each slot, whether it is used or not."""
    engine = load.engine
    length = math.ceil((load.prompt + load.longest) / ROUND) * ROUND
    slots = min(engine.slots or MOST_RUNNING, load.asked)
    rows = padded_rows(engine.slots or slots)
    cache = round(rows * length * model.key_elements * engine.key_bytes)
    kinds = {WEIGHTS: round(model.parameters * engine.weight_bytes), CACHE: cache}
    own = CONTEXT if engine.kind == "local_process" else 0
    return replace(memory, engine=kinds, slots=slots, needed=memory.needed + sum(kinds.values()) + own)


def _with_servers(
    memory: DeviceMemory, model: ModelFacts, layout: DeviceLayout, load: Load, device: DeviceKind, taken: int
) -> DeviceMemory:
    """Add the memory of a server's device, of which others have `taken`. A server takes its whole share when it starts:
    what weights and computation leave is its cache, which must hold one sequence of its maximum length."""
    engine = load.engine
    size = layout.engine_split
    of_layers = model.layers * model.layer
    weights = of_layers * engine.layer_bytes + (model.parameters - of_layers) * engine.weight_bytes
    weights = math.ceil(weights / size)
    computes = CONTEXT + server_work(model, load, device, size)
    token = engine.key_bytes * model.key_elements / key_parts(model, size)
    row = math.ceil(token * max(engine.max_length, load.prompt + load.longest))
    least = weights + computes + row
    room = max(0, memory.memory - taken) // layout.stacked
    if device.name == CPU:
        share = 0.0
        server = weights + computes + engine.cpu_cache
    else:
        chosen = replace(memory, least=least, room=room).best_share
        share = chosen if engine.share is None else engine.share
        server = int(share * memory.memory) + computes * engine.static
        if engine.cache is not None:
            server = weights + computes + engine.cache
    left = server - weights - computes
    most = engine.slots or _usual(device)[1]
    asked = math.ceil(load.asked / layout.engines)
    mean = token * (load.prompt + load.mean)  # a paged cache only holds existing tokens
    slots = 0
    if left >= row:
        slots = int(min(left / mean, most, asked))
    used = round(max(slots, 1) * mean)
    kinds = {WEIGHTS: weights, COMPUTES: computes - CONTEXT, CACHE: used, SPARE: max(0, left - used)}
    beside = taken if layout.colocated else 0
    needed = max(memory.needed, beside + layout.stacked * server)
    return replace(memory, engine=kinds, slots=slots, needed=needed, share=share, server=server, least=least, room=room)


def _usual(device: DeviceKind) -> tuple[int, int]:
    """The tokens of a step and the completions at once of a vLLM server that nobody set."""
    if device.memory >= LARGE and not device.name.startswith("A100"):
        return MANY
    return FEW


def server_work(model: ModelFacts, load: Load, device: DeviceKind, split: int) -> int:
    """Return the bytes with which a server on `split` devices computes its largest step, which it tries when it starts:
    activations of a layer or the logits of all completions, whichever is more, and CUDA graphs."""
    engine = load.engine
    usual_tokens, usual_rows = _usual(device)
    tokens = engine.batched or usual_tokens
    rows = engine.slots or usual_rows
    width = 4 * model.hidden + 3 * model.intermediate / split + 2 * model.experts * model.hidden
    passing = 2 * tokens * width
    sampling = SAMPLED * min(rows, tokens) * model.vocabulary
    return math.ceil(max(passing, sampling)) + GRAPHS * (device.name != CPU and not engine.eager)


def largest_micro_batch(spec: Any, model: ModelFacts, layout: DeviceLayout, load: Load, device: DeviceKind) -> int:
    """Return the tokens of the largest micro-batch with which a rank leaves `MARGIN` of its device free, in steps of
    1,024; 0 if it does not with the longest sequence."""

    def fits(tokens: int) -> bool:
        many = replace(load, sequences=10**9, kept=None, micro_tokens=tokens)  # no update is too short to fill it
        return device_memory(spec, model, layout, many, device).roomy

    longest = load.prompt + load.longest
    larger = range(1024, 2**22, 1024)
    return 1024 * bisect_left(larger, True, key=lambda tokens: not fits(tokens)) or longest * fits(longest)
