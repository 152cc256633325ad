"""An engine that behaves towards a run as a server does, for tests: it is asked before the start, probes its weights,
loses log-probs, and fails. Its completions are those of the local engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from proxima.data import FieldError
from proxima.data.flow import Completion
from proxima.engine.http.server_checks import check_log_probs, check_scoring, precision_notes
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    EngineRequirements,
    EngineSetup,
    EngineSpec,
    Health,
    Request,
    ServerError,
    WeightUpdate,
)
from proxima.model.load import load

ASKED: list[EngineRequirements] = []  # by `check`, in order
BUILT: list[str] = []  # paths of models that engines were built for
CLOSED: list[str] = []


@dataclass(frozen=True, kw_only=True)
class ServerLike(EngineSpec):
    """Args:
    url: names it in messages; `missing` can't be reached.
    log_probs: as `Capabilities`.
    fails_at: of this version `generate` fails; -1: never.
    quantization: what it says of its weights.
    events: lines that it has for the user, from version 2 on.
    """

    needs_weights: ClassVar[bool] = False

    url: str = "http://server"
    log_probs: str = "both"
    fails_at: int = -1
    quantization: str | None = None
    events: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        any_temperature = self.log_probs == "both"
        return Capabilities(
            score=True, scores_any_temperature=any_temperature, deterministic=True, log_probs=self.log_probs
        )

    def check(self, needs: EngineRequirements) -> list[str]:
        ASKED.append(needs)
        if self.url == "missing":
            raise FieldError("url", self.url, "can't be reached", remedy="start it")
        capabilities = replace(self.capabilities, score=False)
        if needs.training is None:
            check_scoring(needs, self.capabilities, self.url)
        notes = precision_notes(needs, dtype=None, quantization=self.quantization, engine=self.url)
        return [*check_log_probs(needs, capabilities, self.url), *notes]

    def build(self, setup: EngineSetup) -> Engine:
        BUILT.append(setup.model_path)
        local = Local(dtype="float32", slots=8)
        return ServerLikeEngine(self, local.build(replace(setup, load_weights=lambda: load(setup.model_path))))


class ServerLikeEngine:
    def __init__(self, spec: ServerLike, engine: Engine) -> None:
        self.spec, self.engine, self.version = spec, engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def capabilities(self) -> Capabilities:
        return self.spec.capabilities

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        if self.version == self.spec.fails_at:
            await asyncio.sleep(0)
            raise ServerError(self.spec.url, "/generate", "can't be reached")
        async for completion in self.engine.generate(requests):
            available = self.spec.capabilities.log_probs_for(requests[0].sampling)
            columns: Any = {
                f"{name}_log_prob": np.full(len(completion.tokens), np.nan, np.float32)
                for name in ("sampled", "untruncated")
                if name not in available or (self.spec.log_probs == "processed" and name == "untruncated")
            }
            yield replace(completion, **columns)

    async def publish(self, update: WeightUpdate) -> None:
        await self.engine.publish(update)
        self.version = update.version

    async def health(self) -> Health:
        health = await self.engine.health()
        sync = {"probe_mean": 0.001 * self.version, "probe_max": 0.01, "perturbed_mean": float("nan"), "seconds": 0.5}
        events = list(self.spec.events) if self.version >= 2 else []
        counts = {"ready": 2, "of": 2, "retried": 3 * self.version, "lost": self.version // 2}
        detail = {"sync": {**sync, "replicas": 2}, "events": events, "replicas": counts}
        return replace(health, detail=detail)

    def close(self) -> None:
        CLOSED.append(self.spec.url)
