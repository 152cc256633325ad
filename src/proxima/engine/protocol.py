"""The engine protocol: prompts in, completions out, with log-probs and versions."""

import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from proxima.data import UserError, require
from proxima.data.columns import Columns, Floats, Ints
from proxima.data.flow import Completion, Key, Prompt, prompt_name
from proxima.engine.variations import Variation
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel, UnloadedModel

PauseMode = Literal["keep", "wait", "abort"]
Interrupt = Literal["recompute", "keep", "finish"]
LogProbName = Literal["sampled", "untruncated"]  # `Completion.sampled_log_prob` and `untruncated_log_prob`
BOTH: frozenset[LogProbName] = frozenset({"sampled", "untruncated"})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. The distribution is softmax(logits / temperature), then top-k, then top-p, then min-p,
    renormalised.

    Args:
        temperature: > 0, or 0 for greedy (evaluation only).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass is at least this; in (0, 1].
        min_p: keep tokens with at least this share of the largest probability; in [0, 1).
        max_tokens: most new tokens of a completion; in [1, 2^31).
        stop: strings that end a completion, and stay in its text. They are searched in what the policy writes, control
            tokens included.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature < math.inf, "temperature", self.temperature, "must be >= 0 and finite; 0 is greedy"
        )
        require(self.top_k >= 0, "top_k", self.top_k, "must be >= 0; 0 keeps all tokens")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 keeps all tokens")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "must be in [0, 1); 0 keeps all tokens")
        require(1 <= self.max_tokens < 2**31, "max_tokens", self.max_tokens, "must be in [1, 2**31)")
        require(all(self.stop), "stop", self.stop, "must hold no empty string")

    @property
    def truncates(self) -> bool:
        """True when some tokens can't be sampled at all, so that the sampled distribution is not the policy's own."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate. Requests of the same prompt share its KV.

    `seed` and (prompt.uid, sample, turn) determine every random draw, by counter, so a completion does not depend on
    other requests.

    Args:
        turn: turn of a conversation. Requests for the first turn (0) of a prompt have the same prompt tokens; later
            ones have their own, which begin with those of the previous turn unless a template has rewritten them.
        shared: lengths, ascending, of prefixes of the prompt that other requests may share, besides its
            `shared_prefix`: contexts of the conversation's earlier turns and of this one. An engine may cache their KV.
        stop_tokens: ids that end the completion; None: those of the model. Only the local engine reads it.
        grammar: a JSON schema, as JSON. Each token is drawn among those after which the text can still become JSON of
            this schema, so that its log-probs are those under a mask which is not reported. None: no grammar. Only an
            engine with `Capabilities.grammars` is asked for one, and raises GrammarRefusedError if it can't follow it.
    """

    prompt: Prompt
    sample: int
    sampling: Sampling
    seed: int = 0
    turn: int = 0
    shared: tuple[int, ...] = ()
    stop_tokens: frozenset[int] | None = None
    grammar: str | None = None

    @property
    def key(self) -> Key:
        """Prompt uid, sample and turn: the `key` of its completion."""
        return self.prompt.uid, self.sample, self.turn

    def in_flight(self, tokens: Ints, policy_version: Ints) -> "InFlight":
        """The completion of this request so far."""
        return InFlight(
            key=self.key,
            prompt_tokens=self.prompt.tokens,
            tokens=tokens,
            policy_version=policy_version,
            temperature=self.sampling.temperature,
        )


def check_prompt(prompt: Prompt, limit: int) -> None:
    """Raise UserError for a prompt without tokens, or with `limit` or more: prompt and one new token must fit."""
    count = len(prompt.tokens)
    if not count:
        raise UserError(f"{prompt_name(prompt.uid)} has no tokens; nothing predicts the first one.")
    if count >= limit:
        figures = f"{count} tokens; the limit, one new token included, is {limit}."
        raise UserError(f"{prompt_name(prompt.uid)} has {figures}")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest(Columns):
    """Tokens to be scored.

    Args:
        prompt_tokens: [P] int32, the tokens on which they are conditioned; at least one.
        tokens: [T] int32.
        temperature: the logits are divided by it; 0 counts as 1, as for a greedy completion.

    Raises: ValueError without prompt tokens.
    """

    prompt_tokens: Ints
    tokens: Ints
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.prompt_tokens):
            raise ValueError("ScoreRequest.prompt_tokens: empty; nothing predicts the first token.")


@dataclass(frozen=True, kw_only=True, eq=False)
class InFlight(Columns):
    """A completion not yet delivered to its caller: it is running, or has ended and waits to be yielded.

    Args:
        key: prompt uid, sample and turn; the `key` that the completion will have.
        prompt_tokens: [P] int32, those of its request.
        tokens: [T] int32, sampled so far.
        policy_version: [T] int32, the version of the weights that sampled each token.
        temperature: that of its request.
    """

    key: Key
    prompt_tokens: Ints
    tokens: Ints
    policy_version: Ints
    temperature: float = 1.0

    @classmethod
    def of(cls, completion: Completion, prompt_tokens: Ints) -> "InFlight":
        """Convert a finished completion. No column is copied."""
        return cls(
            key=completion.key,
            prompt_tokens=prompt_tokens,
            tokens=completion.tokens,
            policy_version=completion.policy_version,
            temperature=completion.temperature,
        )

    @classmethod
    def not_taken(cls, requests: Iterable[Request], replies: Iterable[Any]) -> "list[InFlight]":
        """The finished completions among `replies`, which the caller of `requests` has not taken yet."""
        prompts = {request.key: request.prompt.tokens for request in requests}
        completions = [reply for reply in replies if isinstance(reply, Completion)]
        return [cls.of(completion, prompts[completion.key]) for completion in completions]


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """New weights for an engine: those of a module in this process. If `Capabilities.reads_lent` is set, `publish`
    reads them only within `lent(module)`.

    Args:
        holds: returns whether the module still has these weights; called in the thread for tensor work.
    """

    version: int
    module: nn.Module
    holds: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of an engine.

    Args:
        takes_weights: `publish` loads new weights.
        pause_modes: the modes that `pause` accepts.
        score: `score` is available.
        scores_any_temperature: `score` works at every temperature; otherwise only at 1.
        in_flight: `in_flight` is available.
        aborts_samples: `abort` takes `samples`.
        sampling_mask: with truncated sampling, each token is reported with the tokens that could have been sampled.
        deterministic: a completion depends only on weights, seed, prompt uid, sample and turn, not on other requests.
        log_probs: the distribution to which a reported log-prob refers: `both`, each completion has both columns;
            `processed`, the distribution actually sampled from; `untruncated`, that before truncation; `raw`,
            softmax(logits), without temperature and truncation.
        sleeps: it is a `SleepingEngine`.
        reads_lent: `publish` reads the module's weights only within `lent(module)`, so that several ranks need no whole
            copy of them.
        stages: it is a `StagingEngine`.
        grammars: a request may have a `grammar`.
        max_length: most tokens of prompt and completion together; None: as in its setup.
    """

    takes_weights: bool = True
    pause_modes: frozenset[PauseMode] = frozenset({"keep", "wait", "abort"})
    score: bool = False
    scores_any_temperature: bool = True
    in_flight: bool = False
    aborts_samples: bool = False
    sampling_mask: bool = False
    deterministic: bool = False
    log_probs: Literal["both", "processed", "untruncated", "raw"] = "both"
    sleeps: bool = False
    reads_lent: bool = False
    stages: bool = False
    grammars: bool = False
    max_length: int | None = None

    def log_probs_for(self, sampling: Sampling) -> frozenset[LogProbName]:
        """The log-probs that completions with these settings have. A column that the engine can't provide is NaN."""
        plain = sampling.temperature in (0, 1)  # greedy log-probs are reported at temperature 1
        if self.log_probs == "raw" and not plain:
            return frozenset()
        if self.log_probs == "both" or not sampling.truncates:
            return BOTH
        if self.log_probs == "processed":
            # scoring gives softmax(logits)
            if plain and self.score:
                return BOTH
            return frozenset({"sampled"})
        return frozenset({"untruncated"})


@dataclass(frozen=True, kw_only=True)
class Health:
    """The result of a health check.

    Args:
        ok: the engine answers calls.
        version: that of the weights.
        running, waiting: numbers of completions being sampled, and of those waiting for a slot.
        tokens: number of tokens sampled so far; None: the engine does not count them.
        detail: further information from the engine.
    """

    ok: bool
    version: int
    running: int = 0
    waiting: int = 0
    tokens: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The inputs for building an engine.

    Args:
        model_path: hub name, folder or GGUF file; a server loads it by itself.
        tokenizer: that of the model.
        load_weights: returns model and tokenizer in this process; only specs with `needs_weights` may call it.
        max_length: most tokens of prompt and completion together; None: the model's own limit.
        compute: the thread of this process's tensor work; None: that of the event loop.
        log: file for the output of a process that the engine starts; None: only its stderr is kept, in that of this
            process.
        seed: that of the run, for draws that an engine makes once.
        adapter_rank: rank of the trained adapters; 0: the weights themselves are trained.
        shares_devices: the engine and the trainer take turns on the same devices.
    """

    model_path: str
    tokenizer: Any
    load_weights: Callable[[], LoadedModel]
    max_length: int | None = None
    compute: ComputeThread | None = None
    log: Path | None = None
    seed: int = 0
    adapter_rank: int = 0
    shares_devices: bool = False

    @classmethod
    def of(cls, loaded: LoadedModel, max_length: int | None = None) -> "EngineSetup":
        """The setup for a model that is already loaded."""
        return cls(
            model_path=loaded.path, tokenizer=loaded.tokenizer, load_weights=lambda: loaded, max_length=max_length
        )


@dataclass(frozen=True, kw_only=True)
class EngineRequirements:
    """The requirements of a run on its engine.

    Args:
        model: the model that the engine will run; prompt and completion together have at most its `context`.
        role: the role of the model in the run, for messages: `policy`, `reference` or `teacher`.
        training: sampling of the completions that are trained on; None: there are none.
        samplings: those of all completions that will be requested, including evaluations.
        log_probs: those of a training completion that the loss reads.
        measured: those that only metrics read; a run works without them.
        publishes: new weights are published after each step, as a module.
        overlaps: they are published while completions are running.
        sleeps: the engine must take turns with the trainer on its devices.
        score_temperatures: temperatures of the tokens that will be scored; empty: none will be.
        sampling_mask: each training completion must include the tokens that could have been sampled (`SamplingMask`).
        compute_dtype: that of the trainer's forward pass.
        corrected: the algorithm weights or rejects tokens by their mismatch.
        adapter_rank: rank of the trained adapters; 0: the weights themselves are trained.
    """

    model: UnloadedModel
    role: str = "policy"
    training: Sampling | None = None
    samplings: Sequence[Sampling] = ()
    log_probs: frozenset[LogProbName] = frozenset()
    measured: frozenset[LogProbName] = frozenset()
    publishes: bool = False
    overlaps: bool = False
    sleeps: bool = False
    score_temperatures: Sequence[float] = ()
    sampling_mask: bool = False
    compute_dtype: str = "bfloat16"
    corrected: bool = False
    adapter_rank: int = 0


class EngineSpec(Protocol):
    """The settings of an engine: a frozen dataclass that derives from this class and defines `build`.

    `needs_weights`: the engine has a copy of the weights in this process.
    """

    needs_weights: ClassVar[bool] = False

    @property
    def provides(self) -> frozenset[str]:
        """Tensors of `PolicyBatch` that the completions of this engine fill, including those that a field of the same
        name switches on."""
        switched = (name for name in ("sampling_mask", "routed_experts") if getattr(self, name, False))
        return frozenset({"behavior_log_prob", "policy_version", *switched})

    @property
    def grammars(self) -> bool:
        """Whether a request may have a grammar, as known before a server is up: a fact of the kind."""
        return False

    def check(self, needs: EngineRequirements) -> list[str]:
        """Check, before any weights are loaded, that the engine meets the requirements of the run. An engine in this
        process is built for the run; a server is queried.

        Returns: warnings for the user.

        Raises:
            FieldError: it does not; `field` is one of this spec's own fields, to which the caller adds the path of the
                spec.
            UserError: it does not, and no field is at fault.
        """
        return []

    def longest_sequence(self) -> int | None:
        """The most tokens of prompt and completion together that the servers accept, or will once they are started;
        None: unknown. It bounds the context of a run without `model.max_length`."""
        return None

    def variations(self, device: torch.device) -> Sequence[Variation]:
        """The settings of this kind that may move its log-probs, each with the value that `proxima engine diagnose`
        tries in place of the present one, or the reason for which it is not tried here.

        Args:
            device: that of an engine in this process.
        """
        return ()

    def build(self, setup: EngineSetup) -> "Engine":
        """Build and start the engine."""
        ...


class Engine(Protocol):
    """The interface of every engine, in this process or behind HTTP. `generate` may be called several times
    concurrently; the other methods may be called meanwhile."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this engine; constant."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Stream one completion per request, each as soon as it ends, in any order."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        """Return [T] float32, nats, for each request, in order: log-probs of its tokens under the current weights."""
        ...

    async def in_flight(self) -> list[InFlight]:
        """Return every completion that has a token and had not been yielded at the time of the call; changes nothing. A
        token sampled before the call is in the result, in a completion that was yielded before the result arrived, or
        in both."""
        ...

    async def publish(self, update: WeightUpdate) -> None:
        """Load new weights. Tokens sampled afterwards carry `update.version`; running completions continue under the
        new weights."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling, and return once no token is being sampled.

        Args:
            mode: `keep` holds the running completions at a token boundary until `resume`; `wait` finishes them first
                and starts no others; `abort` ends them and the waiting ones with finish_reason `abort`.
        """
        ...

    async def resume(self) -> None:
        """Resume sampling after `pause`."""
        ...

    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None:
        """End completions of a prompt with finish_reason `abort`: all of them, or those of these samples. `samples` is
        given only to an engine with `Capabilities.aborts_samples`."""
        ...

    async def health(self) -> Health:
        """Health check; answers immediately."""
        ...


def close_engine(engine: Engine) -> None:
    """Call the engine's `close`, which stops everything that it has started outside this process; an engine that starts
    nothing needs no such method."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def stop_waiting(engine: Engine) -> None:
    """Call the engine's `stop_waiting`: the run is to end, so from now on it waits no more for servers that are all out
    of service, and what waits for them raises StoppedWaitingError. An engine that waits for nobody needs no such
    method."""
    stop = getattr(engine, "stop_waiting", None)
    if stop is not None:
        stop()


class StoppedWaitingError(UserError):
    """The user stopped the run while no server was in service; what waited for one did not happen."""


class GrammarRefusedError(UserError):
    """The engine can't follow the grammar of a request, which is at fault; no token was sampled."""


class SleepingEngine(Engine, Protocol):
    """An engine that can release the memory of its devices. Both calls require a paused engine, which stays paused."""

    async def sleep(self) -> None:
        """Release the memory; nothing is sampled, scored or published before `wake`."""
        ...

    async def wake(self) -> None:
        """Take back the memory, with the same weights."""
        ...


class StagingEngine(Engine, Protocol):
    """An engine that copies new weights before it sends them, and samples meanwhile."""

    async def stage(self, update: WeightUpdate) -> None:
        """Copy the weights that the next `publish` will send, so that its pause is shorter."""
        ...


class ServerError(OSError):
    """A call of an engine's server failed, but may succeed later or at another server.

    Args:
        url: that of the server.
        call: the path.
        reason: one line.
        status: HTTP status of the response; None: no response.
        retry_after: seconds to wait before a retry, if the server asks for it.
    """

    def __init__(
        self, url: str, call: str, reason: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{url}{call}: {reason}")
        self.url = url
        self.call = call
        self.reason = reason
        self.status = status
        self.retry_after = retry_after

    @property
    def busy(self) -> bool:
        """True if the server is temporarily overloaded."""
        return self.status in (429, 503)
