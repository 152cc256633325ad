"""The local engine in a separate process, concurrently with the trainer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace

import torch

from proxima.data import UserError, require, require_threads
from proxima.data.columns import Floats
from proxima.data.flow import Completion, Prompt
from proxima.engine.local.local_engine import Local, check_decoder
from proxima.engine.process.channel import ProcessSetup
from proxima.engine.process.shared_weights import SharedWeights, model_as_files
from proxima.engine.process.supervisor import Supervisor
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    EngineSetup,
    Health,
    InFlight,
    PauseMode,
    Request,
    ScoreRequest,
    WeightUpdate,
)
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel

HEALTH_SECONDS = 5.0  # that `health` waits for the process


@dataclass(frozen=True, kw_only=True)
class LocalProcess(Local):
    """The local engine in a separate process, so that it generates while the trainer computes.

    Its completions are bit-identical to those of `local`. Weights are passed through shared memory. A process that dies
    or hangs is replaced, and its unfinished completions are generated again.

    Args:
        threads: torch threads of the engine's process; 0: as many as the trainer's. While both are busy, more threads
            than cores slow both down severely.
        restarts: consecutive processes that may end without a finished completion before the run gives up.
        timeout: seconds without an answer to a health check after which the process counts as hung and is replaced.
    """

    threads: int = 0
    restarts: int = 3
    timeout: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_threads(self.threads, "0 is as many as the trainer's")
        require(self.restarts >= 0, "restarts", self.restarts, "must be >= 0; 0 gives up at once")
        require(self.timeout > 0, "timeout", self.timeout, "must be > 0 seconds")

    def build(self, setup: EngineSetup) -> Engine:
        """Build the engine; its process starts in the background."""
        return ProcessEngine(self, setup)


class ProcessEngine:
    """See `Engine` for the protocol, and `Supervisor` for the handling of a dead process. `close` terminates it.

    A completion that was interrupted first by new weights and then by the death of the process is generated again under
    the newest weights only.

    Args:
        spec: the settings.
        setup: model, limits and log; its weights are copied, by its thread for tensor work.

    Raises:
        UserError: the decoder can't run this model.
    """

    def __init__(self, spec: LocalProcess, setup: EngineSetup) -> None:
        self.spec, self.compute = spec, setup.compute or ComputeThread()
        loaded = self.compute.call(setup.load_weights)
        check_decoder(loaded.model, spec)
        self._device = loaded.model.device
        self._version = 0
        self._weights, first = self.compute.call(_share, loaded, spec, setup.max_length, setup.seed)
        self._supervisor = Supervisor(first, self._weights, restarts=spec.restarts, timeout=spec.timeout, log=setup.log)

    @property
    def capabilities(self) -> Capabilities:
        return self.spec.capabilities_on(self._device)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Stream completions as they end. Concurrent callers share the slots.

        Raises:
            UserError: a prompt is empty, or leaves no room for one token; too many processes in a row ended.
        """
        lean = {id(r.prompt): Prompt(uid=r.prompt.uid, messages=(), tokens=r.prompt.tokens) for r in requests}
        asked = [replace(request, prompt=lean[id(request.prompt)]) for request in requests]
        async with aclosing(self._supervisor.replies("generate", asked)) as replies:  # type: ignore[type-var]
            async for kind, value in replies:
                if kind == "item":
                    yield value

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        scores: list[Floats] = await self._supervisor.ask("score", list(requests))
        return scores

    async def in_flight(self) -> list[InFlight]:
        """See `Engine`. The process sends a finished completion before it answers without it, so anything missing from
        its answer has already arrived here."""
        running: list[InFlight] = await self._supervisor.ask("in_flight")
        return list({part.key: part for part in [*running, *self._supervisor.not_taken()]}.values())

    async def publish(self, update: WeightUpdate) -> None:
        """Copy the weights of a module of the same architecture to the shared memory, and make the process load them;
        see `LocalEngine.publish`. The process has its own copy: its computation never reads the shared one.

        Raises:
            ValueError: the module has other parameters.
        """

        async def write() -> None:
            await self.compute.run(self._weights.write, update.module, update.version)

        await self._supervisor.publish(write, update.version)
        self._version = update.version

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._supervisor.ask("pause", mode)

    async def resume(self) -> None:
        await self._supervisor.ask("resume")

    async def abort(self, prompt_uid: int) -> None:
        await self._supervisor.ask("abort", prompt_uid)

    async def health(self) -> Health:
        """Not `ok` while no process is ready; `detail` has its `pid`, `exits` (the number of processes that have ended)
        and `exit_reason` (of the last one)."""
        supervisor = self._supervisor
        process = supervisor.process
        pid = process.pid if process else None
        detail = {"pid": pid, "exits": supervisor.exits, "exit_reason": supervisor.exit_reason}
        if supervisor.ready:
            with suppress(TimeoutError, UserError):
                health: Health = await asyncio.wait_for(supervisor.ask("health"), HEALTH_SECONDS)
                return replace(health, detail=health.detail | detail)
        return Health(ok=False, version=self._version, waiting=supervisor.outstanding, detail=detail)

    def close(self) -> None:
        """Terminate the process. May be called twice."""
        self._supervisor.close()


def _share(
    loaded: LoadedModel, spec: LocalProcess, max_length: int | None, seed: int
) -> tuple[SharedWeights, ProcessSetup]:
    weights = SharedWeights.allocate(loaded.model)
    weights.write(loaded.model, 0)
    setup = ProcessSetup(
        files=model_as_files(loaded.model, loaded.tokenizer),
        path=loaded.path,
        device=str(loaded.model.device),
        places=weights.places,
        spec=Local(**{setting.name: getattr(spec, setting.name) for setting in fields(Local)}),
        max_length=max_length,
        threads=spec.threads or torch.get_num_threads(),
        seed=seed,
        images=None if (shown := loaded.images) is None else (shown.model, shown.revision, str(shown.shared_folder())),
    )
    return weights, setup
