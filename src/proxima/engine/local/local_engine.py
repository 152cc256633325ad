"""The engine in this process: continuous batching over a decoder with its own copy of the weights."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

from proxima.data import UserError, require
from proxima.data.columns import Floats
from proxima.data.field_checks import check_choices
from proxima.data.flow import Completion
from proxima.engine.local.decoder import Decoder, padded_rows
from proxima.engine.local.decoders import PERTURBED, Perturbation, proven_decoder
from proxima.engine.local.fast_decoder import FastDecoder, supports
from proxima.engine.local.general_decoder import GeneralDecoder
from proxima.engine.local.scheduler import Scheduler
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    EngineSetup,
    EngineSpec,
    Health,
    InFlight,
    Interrupt,
    PauseMode,
    Request,
    ScoreRequest,
    WeightUpdate,
)
from proxima.engine.variations import NO_GRAPHS, Variation, variation
from proxima.model.compute_thread import ComputeThread
from proxima.model.moe import require_moe
from proxima.model.positions import fix_positions
from proxima.model.precision import ComputeDtype, compute_dtype
from proxima.model.pretrained import LoadedModel

STEPS_PER_TURN = 8  # steps decoded before another call may interrupt
ONE_BLOCK = 8  # the fewest slots that there are


@dataclass(frozen=True, kw_only=True)
class Local(EngineSpec):
    """The engine in this process, on its own copy of the policy's weights.

    Args:
        slots: concurrent completions; others wait. Rounded up to a multiple of 8.
        dtype: of the engine's matrix products and cache: `bfloat16`, `float32`, or `auto`, the faster one on this
            machine; norms, residual stream and log-probs are float32.
        decoder: `fast` (Llama, Qwen2, Qwen3), `general` (any Hugging Face decoder), or `auto`: fast if supported.
        prefill_tokens: prompt tokens per prefill.
        top_k_log_probs: number of most probable tokens reported with each token, at most the vocabulary: for the
            divergences `topk_tv` and `topk_kl`, and for `score_centering`; 0: none.
        sampling_mask: with top-k, top-p or min-p, report with each token the tokens that could have been sampled, for
            `algorithm.behavior: sampled`.
        routed_experts: for an MoE model, report with each token the experts to which it was routed, for
            `algorithm.routing_replay: rollout`.
        cuda_graphs: on a GPU, with the fast decoder, launch the kernels of a step together.
        interrupt: how to treat completions that are running when new weights arrive: `recompute` their KV under the new
            weights, `keep` it, or `finish` them under the old weights before the new ones are loaded.
        weights: round the weights of the blocks' linear layers to `int8`, `int4` or `int3`, one scale per output
            channel, at every publication: the mismatch of a quantised server, for experiments. The memory is that of
            `dtype`. null: as trained.
        noise: standard deviation of a bias on the logits of sampling and of all log-probs, at most 100 nats: one normal
            draw per token of the vocabulary, determined by the run's seed; 0: none.
    """

    needs_weights: ClassVar[bool] = True

    slots: int = 64
    dtype: ComputeDtype = "auto"
    decoder: Literal["auto", "fast", "general"] = "auto"
    prefill_tokens: int = 2048
    top_k_log_probs: int = 0
    sampling_mask: bool = False
    routed_experts: bool = False
    cuda_graphs: bool = True
    interrupt: Interrupt = "recompute"
    weights: Literal["int8", "int4", "int3"] | None = None
    noise: float = 0.0

    @property
    def mismatch(self) -> str:
        """The settings that move its log-probs from the trainer's on purpose: `engine.weights=int4`; empty if none
        does. A run's guard reads it."""
        values = {"weights": self.weights, "noise": self.noise}
        return " and ".join(f"engine.{name}={value}" for name, value in values.items() if value)

    @property
    def provides(self) -> frozenset[str]:
        if not self.top_k_log_probs:
            return super().provides
        return super().provides | {"top_k", "behavior_top_k_log_prob", "top_k_log_prob"}

    def __post_init__(self) -> None:
        require(1 <= self.slots <= 65_536, "slots", self.slots, "must be in [1, 65536]")
        check_choices(self)
        require(self.top_k_log_probs >= 0, "top_k_log_probs", self.top_k_log_probs, "must be >= 0; 0 is none")
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "must be >= 1")
        integers = self.weights in (None, "int8", "int4", "int3")
        require(integers, "weights", self.weights, "must be int8, int4 or int3", remedy="null is none")
        require(0 <= self.noise <= 100, "noise", self.noise, "must be in [0, 100] nats; 0 is none")

    def capabilities_on(self, device: torch.device) -> Capabilities:
        """The engine's capabilities with a model on this device."""
        return Capabilities(
            score=True,
            in_flight=True,
            aborts_samples=True,
            sampling_mask=self.sampling_mask,
            deterministic=device.type == "cpu",  # elsewhere kernels are chosen by the row count
        )

    def variations(self, device: torch.device) -> Sequence[Variation]:
        """See `EngineSpec.variations`. Its cached prefixes and float32 heads can't be changed."""
        dtype = "float32" if compute_dtype(self.dtype, device) == torch.bfloat16 else "bfloat16"
        decoder = "auto" if self.decoder == "general" else "general"
        few = None if self.slots > ONE_BLOCK else "the recipe has as few"
        graphs = None if device.type == "cuda" else NO_GRAPHS
        whole = None if self.weights else "the recipe's weights are not quantised"
        silent = None if self.noise else "the recipe adds none"
        switched = "off" if self.cuda_graphs else "on"
        return [
            variation(f"dtype of products and cache: {dtype}", dtype=dtype),
            variation(f"decoder and its attention: {decoder}", decoder=decoder),
            variation("chunked prefill: one prompt at a time", prefill_tokens=1),
            variation(f"batch: {ONE_BLOCK} slots", few, slots=ONE_BLOCK),
            variation(f"CUDA graphs: {switched}", graphs, cuda_graphs=not self.cuda_graphs),
            variation("quantised weights: off", whole, weights=None),
            variation("noise on the logits: off", silent, noise=0.0),
        ]

    def build(self, setup: EngineSetup) -> Engine:
        """Start the engine."""
        compute = setup.compute or ComputeThread()
        weights = compute.call(setup.load_weights)
        return LocalEngine(weights, self, max_length=setup.max_length, compute=compute, seed=setup.seed)


def check_decoder(model: nn.Module, spec: Local) -> None:
    """Raise UserError if `fast` is requested and this architecture has no fast path; FieldError if routes are requested
    and it is not an MoE model."""
    reason = supports(model) if spec.decoder == "fast" else None
    if reason:
        raise UserError(f"engine.decoder='fast': {reason}; use auto or general.")
    if spec.routed_experts:
        require_moe(model.config, "engine.routed_experts", True)


def make_decoder(loaded: LoadedModel, spec: Local, seed: int = 0) -> Decoder:
    """Build the decoder that the settings name, for this model; `seed`: of `spec.noise`.

    Raises:
        UserError: as for `check_decoder` and `proven_decoder`.
    """
    model = loaded.model
    dtype = compute_dtype(spec.dtype, model.device)
    check_decoder(model, spec)
    kind = proven_decoder(model, fast=loaded.images is None and spec.decoder != "general")
    build: Callable[..., Decoder] = kind
    if spec.weights is not None or spec.noise:
        build = partial(PERTURBED[kind], Perturbation.of(model, spec.weights, spec.noise, seed))
    if kind is FastDecoder:
        graphs = padded_rows(spec.slots) if spec.cuda_graphs else 0
        return build(model, dtype, graphs=graphs)
    if kind is GeneralDecoder:
        return build(model, dtype, routes=spec.routed_experts, images=loaded.images)
    return build(model, dtype)


class LocalEngine:
    """See `Engine` for the protocol. Tensor work runs in the compute thread.

    Tokens of a request depend on (seed, prompt uid, sample, turn) and the weights, not on other queued requests: draws
    are counter-based, and on a CPU a row's arithmetic does not depend on the number of other rows.

    Args:
        loaded: model and tokenizer; the weights are copied.
        spec: the settings.
        max_length: tokens of prompt and completion together; None is the model's own limit.
        compute: the thread of the tensor work, which alone touches `scheduler`; None: the thread of the event loop.
        seed: of `spec.noise`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: Local | None = None,
        *,
        max_length: int | None = None,
        compute: ComputeThread | None = None,
        seed: int = 0,
    ) -> None:
        spec = spec or Local()
        self.spec = spec
        self.compute = compute or ComputeThread()
        self.scheduler = self.compute.call(_make_scheduler, loaded, spec, max_length, seed)
        self._open = asyncio.Event()
        self._open.set()
        self._callers: dict[int, tuple[Sequence[Request], deque[Completion]]] = {}  # and completions not taken yet
        self._turn: asyncio.Future[None] | None = None  # of the caller that decodes
        self._drains = False  # `pause("wait")`: nothing is started until `resume`

    @property
    def capabilities(self) -> Capabilities:
        return self.spec.capabilities_on(self.scheduler.cache.device)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Stream completions as they end. Concurrent callers share the slots.

        Raises:
            UserError: a prompt is empty, or leaves no room for one token.
        """
        done: deque[Completion] = deque()
        sink = done.append  # also marks this caller's requests
        remaining = len(requests)
        self._callers[id(done)] = requests, done
        try:
            await self.compute.run(self.scheduler.enqueue, requests, sink)
            while remaining:
                while not done and not self._open.is_set():
                    await self._open.wait()
                # read first: the compute thread may end a completion at any moment
                ended = self.scheduler.completions_ended
                if not done:
                    await self._decode(ended)
                while done:
                    remaining -= 1
                    yield done.popleft()
        finally:
            del self._callers[id(done)]
            if remaining:
                self.compute.submit(self.scheduler.discard, sink)  # not awaited: the caller may be gone

    async def _decode(self, ended: int) -> None:
        """Wait for the next completion of any caller after the first `ended`. One caller decodes for all: if each took
        turns, a completion that ends in one caller's turn would wait for the turns of all others."""
        if self._turn is not None:
            await asyncio.wait({self._turn})  # a caller that leaves does not cancel it
            return
        turn = asyncio.get_running_loop().create_future()
        self._turn = turn
        try:
            await self.compute.run(self._advance, ended)
        finally:
            self._turn = None
            turn.set_result(None)

    def _advance(self, ended: int) -> None:
        """Decode until a completion ends, or another caller, `pause` or `abort` waits for its turn."""
        while self.scheduler.completions_ended == ended:
            self.scheduler.step(STEPS_PER_TURN)
            if self.compute.wanted:
                return

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        columns = list[Floats]()
        for batch in score_batches(requests, self.spec.prefill_tokens):
            columns += await self.compute.run(scored, self.scheduler.decoder, batch)
        return columns

    async def in_flight(self) -> list[InFlight]:
        return await self.compute.run(self._in_flight)

    def _in_flight(self) -> list[InFlight]:
        """Runs in the compute thread, the only one that ends completions, so that none is missed between the running
        ones and those waiting for their callers."""
        parts = self.scheduler.in_flight()
        for requests, done in list(self._callers.values()):
            parts += InFlight.not_taken(requests, tuple(done))
        return parts

    async def publish(self, update: WeightUpdate) -> None:
        """Copy the weights of a module of the same architecture.

        With `interrupt: finish` the running completions end under the old weights first, even during a pause that holds
        them. Otherwise they continue under the new weights; `policy_version` has the version that sampled each token,
        and the log-probs are of that version: with `recompute`, given all earlier tokens; with `keep`, given their KV
        as originally computed. A prompt whose completions are not all running is always prefilled again.
        """
        if self.spec.interrupt == "finish":
            await self._finish_running()
        keeps = self.spec.interrupt == "keep"
        await self.compute.run(self.scheduler.load, update.module, update.version, keeps)
        self.scheduler.starts_waiting = not self._drains
        self._deliver()

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            await self.compute.run(self.scheduler.abort)
        elif mode == "wait":
            self._drains = True
            await self._finish_running()
        self._open.clear()
        await self.compute.run(int)  # whatever was decoding is done when this is
        self._deliver()

    async def _finish_running(self) -> None:
        self.scheduler.starts_waiting = False
        while self.scheduler.running:
            await self.compute.run(self.scheduler.step)

    def _deliver(self) -> None:
        """During a pause, wake callers so that they check for finished completions."""
        if not self._open.is_set():
            self._open.set()
            self._open.clear()

    async def resume(self) -> None:
        self._drains = False
        self.scheduler.starts_waiting = True
        self._open.set()

    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None:
        await self.compute.run(self.scheduler.abort, prompt_uid, samples)
        self._deliver()

    async def health(self) -> Health:
        scheduler = self.scheduler
        return Health(
            ok=True,
            version=scheduler.version,
            running=len(scheduler.running),
            waiting=sum(len(entry.requests) for entry in list(scheduler.waiting)),
            tokens=scheduler.generated_tokens,
        )


def _make_scheduler(loaded: LoadedModel, spec: Local, max_length: int | None, seed: int) -> Scheduler:
    longest = fix_positions(loaded.model, max_length, loaded.max_length) or loaded.max_length
    return Scheduler(
        make_decoder(loaded, spec, seed),
        loaded,
        slots=padded_rows(spec.slots),
        max_length=min(max_length or longest, longest),
        prefill_tokens=spec.prefill_tokens,
        top_k=spec.top_k_log_probs,
        sampling_mask=spec.sampling_mask,
    )


async def collect(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return all completions in the order of the requests."""
    completions = {completion.key: completion async for completion in engine.generate(requests)}
    return [completions[request.key] for request in requests]


SCORED_ROWS = 512  # of logits in memory at a time


def score_batches(requests: Sequence[ScoreRequest], most: int) -> Iterator[list[ScoreRequest]]:
    """Group requests, in order, into batches with at most `most` input tokens; a larger request is a batch by
    itself."""
    batch = list[ScoreRequest]()
    room = most
    for request in requests:
        fed = len(request.prompt_tokens) + max(0, len(request.tokens) - 1)  # the last one predicts nothing
        if batch and fed > room:
            yield batch
            batch = []
            room = most
        batch.append(request)
        room -= fed
    if batch:
        yield batch


@torch.no_grad()
def scored(decoder: Decoder, requests: Sequence[ScoreRequest]) -> list[Floats]:
    """Log-probs [T] of each request's tokens, float32, nats, at its temperature; 0 counts as 1."""
    out: list[Floats] = []
    sequences = [np.concatenate([request.prompt_tokens, request.tokens[:-1]]) for request in requests]
    for request, hidden in zip(requests, decoder.hidden(sequences), strict=True):
        states = hidden[len(request.prompt_tokens) - 1 :][: len(request.tokens)]
        target = torch.tensor(request.tokens, dtype=torch.long, device=hidden.device)[:, None]
        column = np.empty(len(request.tokens), np.float32)
        for at in range(0, len(states), SCORED_ROWS):
            logits = decoder.logits(states[at : at + SCORED_ROWS]).float() / (request.temperature or 1.0)
            log_prob = logits.log_softmax(1).gather(1, target[at : at + SCORED_ROWS]).squeeze(1)
            column[at : at + SCORED_ROWS] = log_prob.cpu().numpy()
        out.append(column)
    return out
