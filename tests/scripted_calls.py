"""An engine that answers every prompt with the same text: what a model that writes calls in one format would."""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxima.data.flow import Completion
from proxima.engine.protocol import (
    Capabilities,
    EngineSetup,
    EngineSpec,
    Health,
    InFlight,
    Request,
    ScoreRequest,
    WeightUpdate,
)


@dataclass(frozen=True)
class Scripted(EngineSpec):
    """Answers with `text`."""

    text: str = "42"
    moves: str = "auto"  # a field that nobody's class answers for

    def build(self, setup: EngineSetup) -> "ScriptedEngine":
        return ScriptedEngine(tuple(setup.tokenizer(self.text).input_ids), self.text)


class ScriptedEngine:
    capabilities = Capabilities(score=True, deterministic=True)

    def __init__(self, tokens: tuple[int, ...], text: str) -> None:
        self.tokens, self.text, self.version = tokens, text, 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        for request in requests:
            yield Completion(
                prompt_uid=request.prompt.uid,
                sample=request.sample,
                turn=request.turn,
                tokens=self.tokens,
                text=self.text,
                sampled_log_prob=0.0,
                untruncated_log_prob=0.0,
                policy_version=self.version,
                finish_reason="stop",
                temperature=request.sampling.temperature,
            )

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        return [np.zeros_like(request.tokens, np.float32) for request in requests]

    async def in_flight(self) -> list[InFlight]:
        return []

    async def publish(self, update: WeightUpdate) -> None:
        self.version = update.version

    async def pause(self, mode: str = "keep") -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None: ...
    async def health(self) -> Health:
        return Health(ok=True, version=self.version)
