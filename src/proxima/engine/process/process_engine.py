"""The local engine in a separate process, concurrently with the trainer; after a death, a new process gets the
unfinished requests.

`Supervisor` uses only the standard library: `subprocess`, a socket pair, and asyncio's streams. `multiprocessing` is
not used, because the same tests would fail or need as much extra code: a spawned process imports the trainer's
`__main__` again, its connections send pickles and block the thread that reads them, and nothing terminates a child
whose parent is killed while the child is still importing torch. A pool of `concurrent.futures` or joblib breaks as a
whole when one of its processes dies, and does not stream results.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from proxima.data import UserError, require, require_threads
from proxima.data.columns import Floats
from proxima.data.flow import Completion, Prompt
from proxima.engine.event_loop_thread import CLOSED, Arrivals, EventLoopThread
from proxima.engine.local.local_engine import Local, check_decoder
from proxima.engine.process.served_engine import MOST, ProcessSetup, receive, send
from proxima.engine.process.shared_weights import SharedWeights, model_as_files
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
from proxima.process.children import start_module
from proxima.process.exit_status import describe_exit

HEALTH_SECONDS = 5.0  # that `health` waits for the process
BEATS = 4  # health checks per timeout of an answer
START_SECONDS = 900.0  # to import torch, and to load the weights of a large model on a busy machine


@dataclass(frozen=True, kw_only=True)
class LocalProcess(Local):
    """The local engine in a separate process, so that it generates while the trainer computes.

    Its completions are bit-identical to those of `local`. Weights are passed through shared memory. A process that dies
    or hangs is replaced, and its unfinished completions are generated again.

    Args:
        threads: torch threads of the engine's process; 0: as many as the trainer has. While both are busy, more threads
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
        self.spec = spec
        self.compute = setup.compute or ComputeThread()
        loaded = self.compute.call(setup.load_weights)
        check_decoder(loaded.model, spec)
        self._device = loaded.model.device
        self._version = 0
        self._weights, first = self.compute.call(_share, loaded, spec, setup.max_length, setup.seed)
        self._supervisor = Supervisor(first, self._weights, restarts=spec.restarts, timeout=spec.timeout, log=setup.log)

    @property
    def capabilities(self) -> Capabilities:
        return self.spec.capabilities_on(self._device)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Stream completions as they end. Concurrent callers share the slots.

        Raises:
            UserError: a prompt is empty, or leaves no room for one token; too many processes in a row ended.
        """
        lean = {
            id(r.prompt): Prompt(uid=r.prompt.uid, messages=(), tokens=r.prompt.tokens, begun=r.prompt.begun)
            for r in requests
        }
        lean_requests = [replace(request, prompt=lean[id(request.prompt)]) for request in requests]
        async with aclosing(self._supervisor.replies("generate", lean_requests)) as replies:
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
        completions = [*running, *self._supervisor.not_taken()]
        by_key = {completion.key: completion for completion in completions}
        return list(by_key.values())

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

    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None:
        await self._supervisor.ask("abort", prompt_uid, samples)

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
    images = None
    store = loaded.images
    if store is not None:
        images = (store.model, store.revision, str(store.shared_folder()))
    setup = ProcessSetup(
        files=model_as_files(loaded.model, loaded.tokenizer),
        path=loaded.path,
        device=str(loaded.model.device),
        places=weights.places,
        spec=Local(**{setting.name: getattr(spec, setting.name) for setting in fields(Local)}),
        max_length=max_length,
        threads=spec.threads or torch.get_num_threads(),
        seed=seed,
        images=images,
    )
    return weights, setup


@dataclass(eq=False)
class EngineCall:
    """A call to the process and its replies.

    Args:
        method, arguments: of `ServedEngine.answer`.
        replies: those that the caller has not taken yet, `item` or `done`, or an exception to raise.
        waits: for the process, or for the next one; not before it is passed on, nor once it is answered in full.
        outstanding: the requests whose completions have not arrived, by key.
    """

    method: str
    arguments: tuple[Any, ...]
    replies: Arrivals[tuple[str, Any]] = field(default_factory=Arrivals)
    waits: bool = False
    outstanding: dict[tuple[int, int, int], Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method == "generate":
            self.outstanding = {request.key: request for request in self.arguments[0]}

    def unanswered(self) -> tuple[Any, ...]:
        """The arguments for a new process, without requests already answered."""
        if self.method == "generate":
            return (list(self.outstanding.values()),)
        return self.arguments


class Supervisor:
    """Starts the process, restarts it when it dies or hangs, and passes calls to it.

    It runs in its own event loop, in a thread that computes nothing: calls may come from any event loop, and a dead
    process is noticed whatever the other threads do. A new process gets the weights in the shared memory, the pause if
    there is one, and every call that was not answered in full, minus the completions already received. The rest are
    generated from their first token, with the same draws.

    Args:
        setup: the first message to each process.
        weights: the shared memory, already filled with weights.
        restarts: number of consecutive processes, after the first, that may end without a completion or score.
        timeout: seconds without an answer to a health check after which the process is killed.
        log: file for the process's output; None: only its stderr, which goes to that of this process.
    """

    def __init__(
        self, setup: ProcessSetup, weights: SharedWeights, *, restarts: int, timeout: float, log: Path | None
    ) -> None:
        self.setup = setup
        self.weights = weights
        self.restarts = restarts
        self.timeout = timeout
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.exits = 0  # number of processes that have ended so far
        self.exit_reason = self._hung = ""  # reason of the last exit; `_hung`: of a process killed because it hung
        self._fruitless = 0  # exits in a row without a completion
        self._calls: dict[int, EngineCall] = {}  # whose callers still take replies
        self._numbers = count(1)
        self._paused = False
        self._writer: asyncio.StreamWriter | None = None  # of a process that is ready
        self._broken: Exception | None = None
        self._reading = asyncio.Lock()  # of the shared memory: held while writing it and while a process starts
        self._publishing = asyncio.Lock()
        self._loop = EventLoopThread("proxima-engine")
        self._supervision = self._loop.start(self._supervise())

    # ---- for callers in any event loop -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if a process is running that answers calls."""
        return self._writer is not None

    @property
    def outstanding(self) -> int:
        """The number of completions that have not arrived."""
        return sum(len(call.outstanding) for call in list(self._calls.values()))

    def not_taken(self) -> list[InFlight]:
        """Completions that have arrived but that their callers have not taken."""
        completions = []
        for call in list(self._calls.values()):
            if call.method == "generate":
                values = [reply[1] for reply in tuple(call.replies.items) if isinstance(reply, tuple)]
                completions += InFlight.not_taken(call.arguments[0], values)
        return completions

    async def replies(self, method: str, *arguments: Any) -> AsyncGenerator[tuple[str, Any], None]:
        """Stream the replies to a call, `done` last; closing the stream cancels the call.

        Raises:
            UserError: too many processes in a row ended without a completion.
            Exception: the exception that the engine raised.
        """
        number = next(self._numbers)
        kind = ""
        call = EngineCall(method, arguments)
        self._calls[number] = call
        try:
            if self._loop.closed:
                raise RuntimeError(CLOSED)
            self._loop.submit(self._begin, number, call)
            while kind != "done":
                kind, value = await call.replies.get()
                yield kind, value
        finally:
            del self._calls[number]
            self._loop.submit(self._cancel, number, call)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Make a call and return its result."""
        return [value async for _, value in self.replies(method, *arguments)][-1]

    async def publish(self, write: Callable[[], Coroutine[Any, Any, object]], version: int) -> None:
        """Call `write` while no process reads the shared memory, and then make the process load it."""

        async def work() -> None:
            async with self._publishing:
                async with self._reading:
                    await write()
                await self.ask("publish", version)

        # cancelling the caller must not leave a half-published version behind
        await asyncio.shield(self._loop.run(work()))

    def close(self) -> None:
        """Kill the process; waiting calls raise."""

        async def last() -> None:
            self._break(RuntimeError(CLOSED))

        if not self._loop.closed:
            self._loop.close(last)
            os.close(self.weights.fd)

    # ---- in the supervisor's own -------------------------------------------------------------------------------------

    def _begin(self, number: int, call: EngineCall) -> None:
        if self._broken is not None:
            call.replies.put(self._broken)
            return
        call.waits = True
        if call.method == "resume":
            self._paused = False
        if self._writer is not None:
            send(self._writer, (number, call.method, call.arguments))

    def _cancel(self, number: int, call: EngineCall) -> None:
        if call.waits and self._writer is not None:
            send(self._writer, (number, "cancel", ()))

    def _replied(self, number: int, kind: str, value: Any) -> None:
        call = self._calls.get(number)
        if call is None:  # its caller has left
            return
        if kind == "item" or call.method == "score":
            self._fruitless = 0
        if kind == "item":
            call.outstanding.pop(value.key, None)
        else:
            call.waits = False
            if call.method == "pause" and kind == "done":
                self._paused = True
        reply = value if kind == "error" else (kind, value)
        call.replies.put(reply)

    async def _supervise(self) -> None:
        while self._broken is None:
            try:
                with self.log.open("ab") if self.log else nullcontext() as log:
                    await self._run_process(log)
            except OSError as error:  # no memory or descriptor for another process, perhaps temporarily
                await asyncio.sleep(1 / BEATS)
                print(f"engine: {error}", file=sys.stderr)
            except Exception as error:
                self._break(error)
            reason = "could not be started"
            if self.process:
                reason = describe_exit(self.process.returncode)
            self.exit_reason = self._hung or reason
            self._hung = ""
            self.exits += 1
            self._fruitless += 1
            if self._fruitless > self.restarts and self._broken is None:
                times = "once" if self._fruitless == 1 else f"{self._fruitless} times in a row"
                message = f"the engine's process ended {times} without a completion: {self.exit_reason}"
                if self.log:
                    message = f"{message}; see {self.log}"
                self._break(UserError(message, remedy="resume the run (--resume), or raise engine.restarts"))

    def _break(self, error: Exception) -> None:
        """Give up: no further process is started."""
        self._broken = self._broken or error
        for call in list(self._calls.values()):
            call.replies.put(self._broken)

    async def _run_process(self, log: Any) -> None:
        """Start a process and forward its replies until it ends."""
        threads = str(self.setup.threads)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        fd = self.weights.fd
        stdout = log or subprocess.DEVNULL
        served = "proxima.engine.process.served_engine"
        child = start_module(served, fd, fds=[fd], env=environment, stdout=stdout, stderr=log)
        self.process = child.process
        watching: asyncio.Task[None] | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=child.channel, limit=MOST)
            async with self._reading:
                send(writer, self.setup)
                _, kind, value = await asyncio.wait_for(receive(reader), START_SECONDS)
            if kind == "error":
                self._break(value)
                return
            if self._paused:
                send(writer, (0, "pause", ("keep",)))
            for number, call in sorted(self._calls.items(), key=itemgetter(0)):
                if call.waits:
                    send(writer, (number, call.method, call.unanswered()))
            self._writer = writer
            watching = asyncio.create_task(self._watch(child.process))
            while True:
                self._replied(*await receive(reader))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer = None
            if watching is not None:
                watching.cancel()
            if writer is not None:  # else the garbage collector would close the next process's descriptor
                writer.transport.abort()
            child.end()

    async def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the process if it does not answer health checks."""
        while True:
            await asyncio.sleep(self.timeout / BEATS)
            try:
                await asyncio.wait_for(self.ask("health"), self.timeout)
            except TimeoutError:
                self._hung = f"it gave no answer for {self.timeout:g} s (engine.timeout) and was killed"
                process.kill()
