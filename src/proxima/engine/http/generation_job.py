"""A partial completion: the servers' answers to one request, validated before they are used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from proxima.data.columns import ExpertIds, Floats, Ints, SamplingMask
from proxima.data.flow import Completion, FinishReason
from proxima.data.random import server_seed
from proxima.engine.http.answer_checks import (
    WrongAnswerError,
    check_sampling,
    checked_log_probs,
    log_prob_columns,
    mask_of,
    spans_of,
)
from proxima.engine.http.answer_values import RouteShape, joined_routes
from proxima.engine.http.dialect import Chunk, LogProbMode, TokenRequest, WrittenTokens, tokens_as_read
from proxima.engine.protocol import EngineSetup, InFlight, Request, check_prompt
from proxima.model.chat.written_text import sampled_text, stop_string, written_text
from proxima.model.moe import FAMILIES
from proxima.model.positions import context_limit
from proxima.model.pretrained import load_config, load_generation_config, stop_tokens_of

Deliver = Callable[[Completion | BaseException], object]


@dataclass(frozen=True, kw_only=True)
class CompletionRules:
    """The limits that a completion of this model must satisfy.

    Args:
        tokenizer: of the model.
        stop_tokens: ids that end a completion.
        vocabulary: all ids are below it.
        max_length: tokens of prompt and completion together.
        log_probs: the distribution that the servers' log-probs refer to; see `ServerFacts`.
        sampling_mask: the servers return the tokens that could have been sampled.
        routes: the servers return the experts of each token, in this shape; None: they don't.
        latest_routes: as in `ServerFacts`.
    """

    tokenizer: Any
    stop_tokens: tuple[int, ...]
    vocabulary: int
    max_length: int
    log_probs: LogProbMode = "processed"
    sampling_mask: bool = False
    routes: RouteShape | None = None
    latest_routes: bool = False

    @classmethod
    def of(cls, setup: EngineSetup) -> "CompletionRules":
        """The rules of a model whose weights are elsewhere."""
        config = load_config(setup.model_path)
        generation_config = load_generation_config(setup.model_path)
        text = config.get_text_config()
        longest = context_limit(text)
        return cls(
            tokenizer=setup.tokenizer,
            stop_tokens=stop_tokens_of(generation_config, config, setup.tokenizer),
            vocabulary=int(text.vocab_size),
            max_length=min(setup.max_length or longest, longest),
            routes=RouteShape.of(text) if text.model_type in FAMILIES else None,
        )


@dataclass(eq=False)
class JobSegment:
    """The tokens of one request to a server so far.

    Args:
        marks: (tokens before it, version): the weights of the replica, according to the updates that were sent to it.
        log_probs: `log_prob` and `sampled_log_prob` of `Chunk`; NaN where the second is absent.
        spans: the versions that the server reports at the end: (version, start, end).
        confirmed: so many tokens the server had sampled when it confirmed that it had the weights it was given.
        routes: of all input tokens, starting with the prompt's first.
        mismatched: versions that the replica reported during the request, but was then found not to compute with.
    """

    marks: list[tuple[int, int]]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, float]] = field(default_factory=list)
    spans: list[tuple[int, int, int]] | None = None
    masks: list[SamplingMask] = field(default_factory=list)
    routes: ExpertIds | None = None
    confirmed: int = 0
    mismatched: set[int] = field(default_factory=set)

    def cut(self, length: int) -> None:
        """Drop the tokens from index `length` on."""
        del self.tokens[length:], self.log_probs[length:]
        self.confirmed = min(self.confirmed, length)
        if self.masks:
            self.masks = [SamplingMask.joined(self.masks).part(0, length)]

    @property
    def is_unverified(self) -> bool:
        """True if the server has not confirmed which weights sampled all of its tokens."""
        return self.spans is None and self.confirmed < len(self.tokens)

    @property
    def is_mismatched(self) -> bool:
        """True if a server attributes tokens to weights that it did not have."""
        return any(version in self.mismatched for version, _, _ in self.spans or ())

    @property
    def versions(self) -> Ints:
        """[T] the policy version of each token."""
        column = np.empty(len(self.tokens), np.int32)
        if self.spans is not None:
            for version, start, end in self.spans:
                column[start:end] = version
        else:
            for start, version in self.marks:
                column[start:] = version
        return column


class GenerationJob:
    """One request of a caller, from its first attempt to its completion.

    Args:
        request: the caller's request.
        rules: the limits of a valid answer.
        deliver: gets the completion, or the error in its place, once.

    Raises:
        UserError: a prompt that is empty or leaves no room for one token, or a sampling for which the servers report
            no log-probs.
    """

    def __init__(self, request: Request, rules: CompletionRules, deliver: Deliver) -> None:
        self.request = request
        self.rules = rules
        self._deliver: Deliver | None = deliver
        prompt = request.prompt
        check_prompt(prompt, rules.max_length)
        check_sampling(request.sampling, rules.log_probs)
        self.limit = min(request.sampling.max_tokens, rules.max_length - len(prompt.tokens))
        self.kept: list[JobSegment] = []
        self.current: JobSegment | None = None
        self.failures = 0  # consecutive attempts without tokens
        self.tried: set[object] = set()  # replicas where an attempt failed
        self.reason: FinishReason | None = None  # set when it has ended
        self.scored: Floats | None = None

    @property
    def masked(self) -> bool:
        """True if the completion includes, for each token, those that could have been sampled."""
        sampling = self.request.sampling
        return self.rules.sampling_mask and sampling.truncates and sampling.temperature > 0

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return sum(len(segment.tokens) for segment in self._segments)

    @property
    def _segments(self) -> list[JobSegment]:
        if self.current is None:
            return self.kept
        return [*self.kept, self.current]

    @property
    def tokens(self) -> Ints:
        """[T] the tokens so far."""
        return _tokens_of(self._segments)

    @property
    def policy_version(self) -> Ints:
        """[T] the policy version of each token so far."""
        nothing = np.empty(0, np.int32)
        return np.concatenate([nothing, *(segment.versions for segment in self._segments)])

    # ---- an attempt --------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> JobSegment:
        """Start an attempt at a replica with these weights."""
        self.current = JobSegment([(0, version)])
        return self.current

    def token_request(self, name: str, *, salt: str | None, seeded: bool, chunk_tokens: int) -> TokenRequest:
        """The request to a server for the tokens that are still missing."""
        request = self.request
        length = self.length
        uid, sample, turn = request.key
        sampling = replace(request.sampling, max_tokens=self.limit - length)
        if not sampling.temperature:  # the largest logit is never truncated: its log-prob is that at temperature 1
            sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        tokens = np.concatenate([request.prompt.tokens, self.tokens])
        sent = WrittenTokens.of(tokens, self.rules.tokenizer)
        seed = server_seed(request.seed, uid, sample, length, turn=turn) if seeded else None
        return TokenRequest(
            id=name,
            tokens=sent.written,
            images=sent.images,
            read=len(tokens),
            sampling=sampling,
            seed=seed,
            cache_salt=salt,
            stop_tokens=self.rules.stop_tokens,
            chunk_tokens=chunk_tokens,
            sampling_mask=self.masked,
            routes=self.rules.routes,
            grammar=request.grammar,
        )

    def append(self, chunk: Chunk, labels: Mapping[str, int]) -> FinishReason | None:
        """Append a chunk to the current attempt; return the finish reason if it is the end.

        Args:
            labels: the versions that the replica had during the attempt, by the server's labels; empty: the labels are
                unknown.

        Raises:
            WrongAnswerError: the chunk is not a valid answer.
        """
        segment = self.current
        assert segment is not None
        before = len(segment.tokens)
        self._check(chunk)
        log_prob = checked_log_probs(chunk.log_prob)
        beside = np.full_like(log_prob, np.nan)
        if chunk.sampled_log_prob is not None:
            beside = checked_log_probs(chunk.sampled_log_prob)
        segment.tokens += chunk.tokens.tolist()
        segment.log_probs += zip(log_prob.tolist(), beside.tolist(), strict=True)
        if self.masked:
            segment.masks.append(mask_of(chunk))
        if self.length > self.limit:
            raise WrongAnswerError(f"more than the {self.limit} tokens that were asked for")
        self._take_routes(segment, chunk)
        end = self._end_within(segment, before)
        if chunk.version_spans is not None and labels:
            segment.spans = spans_of(chunk.version_spans, len(segment.tokens), labels)
        if end is not None:
            segment.cut(end)
            return "stop"
        if chunk.finish_reason == "length" and self.length < self.limit:
            raise WrongAnswerError(f"ended for its length after {self.length} of {self.limit} tokens")
        if chunk.finish_reason == "stop" and not (self.length and self.request.sampling.stop):
            raise WrongAnswerError(f"stopped at token {segment.tokens[-1:]}, which ends no completion")
        if chunk.finish_reason is None and self.length == self.limit:
            return None  # the last message is still to come
        return chunk.finish_reason

    def _take_routes(self, segment: JobSegment, chunk: Chunk) -> None:
        """Store the routes of the whole attempt, which arrive with its end; an aborted attempt may lack them."""
        expected = chunk.routes is not None or chunk.finish_reason in ("stop", "length")
        if self.rules.routes is None or not expected:
            return
        fed = len(self._asked()) + len(segment.tokens) - 1
        rows = 0 if chunk.routes is None else len(chunk.routes)
        if rows != fed:
            raise WrongAnswerError(f"routed experts of {rows} tokens, where {fed} were fed")
        segment.routes = chunk.routes

    def _check(self, chunk: Chunk) -> None:
        if chunk.prompt_tokens is not None:
            asked = tokens_as_read(self._asked(), self.rules.tokenizer)
            if not np.array_equal(chunk.prompt_tokens, asked):
                raise WrongAnswerError("the answer to another prompt")
        impossible = chunk.tokens[(chunk.tokens < 0) | (chunk.tokens >= self.rules.vocabulary)]
        if len(impossible):
            raise WrongAnswerError(f"token {impossible[0]} of a vocabulary of {self.rules.vocabulary}")

    def _asked(self) -> Ints:
        """The tokens that the current attempt asked the server to continue."""
        return np.concatenate([self.request.prompt.tokens, _tokens_of(self.kept)])

    def _end_within(self, segment: JobSegment, start: int) -> int | None:
        """Count the attempt's tokens up to a stop that the server has not noticed, searched from `start` on: a stop
        token, or a stop string that begins before the attempt. None: no stop."""
        tokens = segment.tokens
        for at in range(start, len(tokens)):
            if tokens[at] in self.rules.stop_tokens:
                return at + 1
        stop = self.request.sampling.stop
        if stop and self.kept and start <= max(len(string.encode()) for string in stop):  # a token has a byte or more
            seam = self.length - len(tokens)
            everything = self.tokens
            for at in range(start, len(tokens)):
                text = self._text_of(everything[: seam + at + 1])
                if stop_string(text, stop) is not None:
                    return at + 1
        return None

    def _text_of(self, tokens: Ints) -> str:
        """The text of the first tokens, as `written_text` decodes it."""
        return sampled_text(self.rules.tokenizer, tokens, after_text=bool(self.request.prompt.begun))

    # ---- its end -----------------------------------------------------------------------------------------------------

    def keep(self) -> int:
        """End the attempt and keep its tokens. Returns the number of tokens kept: none of a part of a completion under
        a grammar, because a server that is given the part begins the grammar anew after it."""
        segment = self.current
        self.current = None
        if segment is not None and segment.spans is None and len(segment.marks) > 1:
            segment.cut(segment.marks[1][0])  # the weights that sampled the later tokens are unknown
            self.reason = None
        if segment is None or not segment.tokens:
            return 0
        self.kept.append(segment)
        self.reason = self.reason or self._reason_so_far()
        if self.request.grammar is not None and self.reason is None:
            self.kept.clear()
            return 0
        return len(segment.tokens)

    def discard(self) -> int:
        """Discard the attempt. Returns the number of discarded tokens."""
        segment = self.current
        self.current = None
        return 0 if segment is None else len(segment.tokens)

    def forget(self, segment: JobSegment) -> int:
        """Drop the last attempt, whose segment this is, and any finish reason. Returns the number of dropped tokens."""
        if segment in self.kept:
            self.kept.remove(segment)
        self.current = self.reason = None
        return len(segment.tokens)

    def forget_unconfirmed(self, segment: JobSegment) -> int:
        """Like `forget`, but keep the tokens that the server has confirmed before."""
        if not segment.confirmed:
            return self.forget(segment)
        dropped = len(segment.tokens) - segment.confirmed
        segment.cut(segment.confirmed)
        self.reason = None
        return dropped

    def _reason_so_far(self) -> FinishReason | None:
        tokens = self.tokens
        stop = self.request.sampling.stop
        if stop and stop_string(self._text_of(tokens), stop) is not None:
            return "stop"
        return "length" if len(tokens) == self.limit else None

    def in_flight(self) -> InFlight:
        """The completion so far."""
        return self.request.in_flight(self.tokens, self.policy_version)

    def finish(self, reason: FinishReason) -> None:
        """Deliver the completion with the tokens so far, once, and only if the caller has not left."""
        deliver = self._deliver
        self._deliver = None
        self.reason = reason
        if deliver is not None:
            deliver(self._completion(reason))

    def fail(self, error: BaseException) -> None:
        """Deliver an error instead of the completion."""
        deliver = self._deliver
        self._deliver = None
        if deliver is not None:
            deliver(error)

    def withdraw(self) -> None:
        """Note that the caller has left."""
        self._deliver = None

    @property
    def wanted(self) -> bool:
        """True while a caller is waiting for it."""
        return self._deliver is not None

    def _completion(self, reason: FinishReason) -> Completion:
        request = self.request
        sampling = self.request.sampling
        tokens = self.tokens
        pairs = list[tuple[float, float]]()
        masks = list[SamplingMask]()
        for segment in self._segments:
            pairs += segment.log_probs
            masks += segment.masks
        reported, beside = np.ascontiguousarray(np.array(pairs, np.float32).reshape(-1, 2).T)
        sampled, untruncated = log_prob_columns(reported, self.rules.log_probs, sampling, self.scored)
        if not np.isnan(beside).any():
            sampled = beside
        begun = request.prompt.begun
        ends = self.rules.stop_tokens
        written = written_text(self.rules.tokenizer, tokens, begun=begun, ends=ends, stop=sampling.stop)
        mask = SamplingMask.joined(masks) if self.masked and len(tokens) else None
        routes, prompt_routes = self._routes()
        return Completion(
            prompt_uid=request.prompt.uid,
            sample=request.sample,
            turn=request.turn,
            tokens=tokens,
            text=written.text,
            stopped_by=written.stopped_by,
            sampled_log_prob=sampled,
            untruncated_log_prob=untruncated,
            policy_version=self.policy_version,
            finish_reason=reason,
            temperature=sampling.temperature,
            sampling_mask=mask,
            routed_experts=routes,
            prompt_routed_experts=prompt_routes,
        )

    def _routes(self) -> tuple[ExpertIds | None, ExpertIds | None]:
        """The experts of each token under the weights that sampled it, and those of the prompt."""
        if self.rules.routes is None:
            return None, None
        parts = []
        for segment in self._segments:
            versions = segment.versions
            counts = np.full(len(versions), True)
            if self.rules.latest_routes:
                counts = versions == versions[-1:]
            parts.append((segment.routes, counts))
        return joined_routes(self.rules.routes, len(self.request.prompt.tokens), parts)


def _tokens_of(segments: Sequence[JobSegment]) -> Ints:
    tokens = [token for segment in segments for token in segment.tokens]
    return np.array(tokens, np.int32)
