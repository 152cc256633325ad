"""The engine of a recipe, started with one setting or another, and what it says of tokens, beside the trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.flow import Completion
from proxima.engine.engine_selection import EngineSelection
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import Engine, Request, Sampling, ScoreRequest, WeightUpdate, close_engine
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.runtime.diagnosis.mismatch import distances
from proxima.runtime.diagnosis.trainer_view import EngineAnswer, TrainerView

T = TypeVar("T")

ANY = 1e9  # nats: a server whose weights a run would refuse is diagnosed, not refused


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """What an engine said.

    Args:
        answers: that it sampled, in the order of the requests.
        scores: [T] nats, its log-probs of the answers that the recipe's engine sampled, at temperature 1; None if it
            scores no tokens.
        own_scores: [T] nats, the same of the answers that it sampled itself.
        rate: sampled tokens a second, the start of the answers included.
    """

    answers: Sequence[EngineAnswer]
    scores: Sequence[Floats] | None
    own_scores: Sequence[Floats] | None
    rate: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Ratios:
    """ρ of each answer, [T] nats: the trainer's log-probs less the engine's.

    Args:
        sampled: of the tokens that the engine sampled.
        scored: of the same tokens for every engine, as it scores them; None if it does not.
        own_scored: of the tokens that it sampled, as it scores them at temperature 1; None if it does not.
    """

    sampled: Sequence[Floats]
    scored: Sequence[Floats] | None
    own_scored: Sequence[Floats] | None

    @property
    def ways(self) -> dict[str, Floats]:
        """[n] nats a token of each answer, in the ways in which settings are compared: |ρ| of the same tokens by
        scoring; and of sampled tokens, what reporting adds to scoring them. Other tokens have another |ρ|, and only
        that difference is of the engine."""
        ways = dict[str, Floats]()
        if self.scored is not None:
            ways["scored"] = distances(self.scored)
        ways["sampled"] = distances(self.sampled)
        if self.own_scored is not None:
            ways["sampled"] = ways["sampled"] - distances(self.own_scored)
        return ways


@dataclass(kw_only=True, eq=False)
class Bench:
    """An engine and a trainer with the same weights.

    Args:
        choice: the recipe's engine, and what the run needs of it.
        loaded: the trained model; an engine gets its weights as at the start of a run.
        requests: those that every engine answers.
        seed: that of the run.
        answers: those of the recipe's engine, which all engines score; None until they are there.
    """

    choice: EngineSelection
    loaded: LoadedModel
    view: TrainerView
    requests: Sequence[Request]
    seed: int
    compute: ComputeThread = field(default_factory=ComputeThread)
    answers: Sequence[EngineAnswer] | None = None
    versions: int = 0

    @contextmanager
    def running(self, spec: Any) -> Iterator[Engine]:
        """The engine of a spec with the trainer's weights, until the end of the block.

        Raises:
            FieldError, UserError: it does not start, or takes no weights.
        """
        if isinstance(spec, ServerSettings):
            spec = replace(spec, probe_bound=ANY)
        choice = replace(self.choice, spec=spec)
        engine, _ = choice.build(lambda: self.loaded, compute=self.compute, log=None, seed=self.seed)
        try:
            self.publish(engine)
            yield engine
        finally:
            close_engine(engine)

    def publish(self, engine: Engine) -> None:
        """Give the engine the weights that the trainer has now, as a run does after a step."""
        if engine.capabilities.takes_weights:
            update = WeightUpdate(version=self.versions, module=self.view.module)
            self.versions += 1
            self.compute.serve(engine.publish(update))

    def read(self, engine: Engine, requests: Sequence[Request] | None = None, *, at_once: bool = True) -> Reading:
        """Let the engine sample and score.

        Args:
            requests: None: those of the bench.
            at_once: all together, else one after another.

        Raises:
            UserError: the engine reports no log-probs under this sampling.
        """
        if requests is None:
            requests = self.requests
        begin = monotonic()
        answers = self.sample(engine, requests, at_once=at_once)
        seconds = monotonic() - begin
        scores = None
        if self.answers is not None:
            scores = self.score(engine, self.answers, at_once=at_once)
        return Reading(
            answers=answers,
            scores=scores,
            own_scores=self.score(engine, answers, at_once=at_once),
            rate=sum(len(each.tokens) for each in answers) / seconds,
        )

    def sample(self, engine: Engine, requests: Sequence[Request], *, at_once: bool = True) -> list[EngineAnswer]:
        """The engine's answers, in the order of the requests, which are sampled alike.

        Raises:
            UserError: as for `read`.
        """
        completions = list[Completion]()
        for part in _calls(requests, at_once=at_once):
            completions += self.compute.serve(collect(engine, part))
        asked = requests[0].sampling
        known = engine.capabilities.log_probs_for(asked)
        if not known:
            reason = f"the engine reports no log-probs at temperature {asked.temperature:g}"
            raise UserError(reason, remedy="set engine.serve.log_probs=processed, or sample at temperature 1")
        if "sampled" in known:
            column = "sampled_log_prob"
            reported = asked
        else:
            column = "untruncated_log_prob"
            reported = Sampling(temperature=asked.temperature)
        answers = []
        for request, completion in zip(requests, completions, strict=True):
            answer = EngineAnswer(
                group=request.prompt.uid,
                prompt_tokens=request.prompt.tokens,
                tokens=completion.tokens,
                reported=getattr(completion, column),
                sampling=reported,
            )
            answers.append(answer)
        return answers

    def score(self, engine: Engine, answers: Sequence[EngineAnswer], *, at_once: bool = True) -> list[Floats] | None:
        """[T] nats of the tokens of each answer, by the engine at temperature 1; None if it scores no tokens."""
        if not engine.capabilities.score:
            return None
        requests = [ScoreRequest(prompt_tokens=each.prompt_tokens, tokens=each.tokens) for each in answers]
        scores = list[Floats]()
        for part in _calls(requests, at_once=at_once):
            scores += self.compute.serve(engine.score(part))
        return scores

    def ratios(self, reading: Reading) -> Ratios:
        """ρ by the weights that the trainer has now."""
        scored = None
        own_scored = None
        if reading.scores is not None and self.answers is not None:
            scored = less(self.view.log_prob(self.answers, 1.0), reading.scores)
        if reading.own_scores is not None:
            own_scored = less(self.view.log_prob(reading.answers, 1.0), reading.own_scores)
        return Ratios(sampled=self.of_reported(reading.answers), scored=scored, own_scored=own_scored)

    def of_reported(self, answers: Sequence[EngineAnswer]) -> list[Floats]:
        """ρ of sampled answers, by the log-probs that the engine reported and the weights that the trainer has now."""
        return less(self.view.reported(answers), [answer.reported for answer in answers])


def _calls(requests: Sequence[T], *, at_once: bool) -> list[Sequence[T]]:
    """The requests of each call to the engine."""
    if at_once:
        return [requests]
    return [[request] for request in requests]


def less(values: Sequence[Floats], others: Sequence[Floats]) -> list[Floats]:
    """The differences of two log-probs of each answer."""
    return [value - other for value, other in zip(values, others, strict=True)]
