"""An engine that calls hooks when it pauses and resumes."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Literal, cast, get_args

from proxima.data.columns import Floats
from proxima.data.flow import Completion
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    Health,
    InFlight,
    PauseMode,
    Request,
    ScoreRequest,
    StagingEngine,
    WeightUpdate,
    close_engine,
    stop_waiting,
)

Stage = Literal["pre_pause", "post_pause", "pre_resume", "post_resume"]
Hook = Callable[[], object]  # its result is awaited if it is awaitable
RemoveHook = Callable[[], None]


class HookError(RuntimeError):
    """Hooks of a stage failed. The message names each of them and its exception.

    Args:
        stage: the stage at which they were called.
        failures: name and exception of each, in the order of the calls.
    """

    def __init__(self, stage: Stage, failures: Sequence[tuple[str, Exception]]) -> None:
        self.stage = stage
        self.failures = tuple(failures)
        messages = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures)
        hooks = f"1 {stage} hook" if len(failures) == 1 else f"{len(failures)} {stage} hooks"
        super().__init__(f"{hooks} failed: {messages}")


class Executor:
    """An engine, with hooks before and after it pauses and resumes.

    Hooks take no argument, may be synchronous or asynchronous, and run one after the other in the order of
    registration. When one raises, the others of the stage still run; then `HookError` names all that failed, and the
    transition stops there: after `pre_pause` the engine still runs, after `post_pause` and `pre_resume` it is paused,
    after `post_resume` it runs. From each of these states `pause` and `resume` work as usual. Pausing a paused engine
    or resuming a running one calls no hook.

    A hook may call anything that terminates: `score`, `publish`, `abort`, `health`, and, while the engine runs,
    `generate`. If it waits for a pause or resume of the executor, or for completions of the paused engine, it fails
    after `hook_seconds`; its task is not cancelled.

    Args:
        engine: does the work.
        hook_seconds: time limit of an asynchronous hook.

    `newest` is the version of the last weights passed to `publish`, None before the first. The engine may have some of
    these weights even if it could not take all of them.
    """

    def __init__(self, engine: Engine, *, hook_seconds: float = 600.0) -> None:
        self.engine = engine
        self.hook_seconds = hook_seconds
        self._hooks: dict[Stage, dict[object, Hook]] = {stage: {} for stage in get_args(Stage)}
        self._transition = asyncio.Lock()
        self._paused = False
        self.newest: int | None = None

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def register_pre_pause_hook(self, hook: Hook) -> RemoveHook:
        """Call `hook` before the engine pauses, while it still samples. Returns a function that removes the hook."""
        return self._register("pre_pause", hook)

    def register_post_pause_hook(self, hook: Hook) -> RemoveHook:
        """Call `hook` when no token is being sampled any more. Returns a function that removes the hook."""
        return self._register("post_pause", hook)

    def register_pre_resume_hook(self, hook: Hook) -> RemoveHook:
        """Call `hook` before the engine samples again. Returns a function that removes the hook."""
        return self._register("pre_resume", hook)

    def register_post_resume_hook(self, hook: Hook) -> RemoveHook:
        """Call `hook` when the engine samples again. Returns a function that removes the hook."""
        return self._register("post_resume", hook)

    def _register(self, stage: Stage, hook: Hook) -> RemoveHook:
        key = object()  # a hook may be registered several times
        hooks = self._hooks[stage]
        hooks[key] = hook

        def remove() -> None:
            hooks.pop(key, None)

        return remove

    async def _call_hooks(self, stage: Stage) -> None:
        """Call the hooks of a stage; raise HookError if some fail."""
        hooks = self._hooks[stage]
        failures = list[tuple[str, Exception]]()
        for key, hook in list(hooks.items()):
            if key not in hooks:  # removed by an earlier hook
                continue
            try:
                result = hook()
                if inspect.isawaitable(result):
                    await _limited(result, self.hook_seconds)
            except Exception as error:
                failures.append((getattr(hook, "__qualname__", repr(hook)), error))
        if failures:
            raise HookError(stage, failures) from failures[0][1]

    # ---- the engine --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `Engine`.

        Raises:
            HookError: hooks failed; see the class for the resulting state.
        """
        await self._change("pre_pause", lambda: self.engine.pause(mode), "post_pause", paused=True)

    async def resume(self) -> None:
        """See `Engine`.

        Raises:
            HookError: as `pause`.
        """
        await self._change("pre_resume", self.engine.resume, "post_resume", paused=False)

    async def _change(self, before: Stage, work: Callable[[], Awaitable[None]], after: Stage, *, paused: bool) -> None:
        async with self._transition:
            changes = self._paused != paused
            if changes:
                await self._call_hooks(before)
            await work()
            self._paused = paused
            if changes:
                await self._call_hooks(after)

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        return self.engine.generate(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        return await self.engine.score(requests)

    async def in_flight(self) -> list[InFlight]:
        return await self.engine.in_flight()

    async def stage(self, update: WeightUpdate) -> None:
        """See `StagingEngine`; for an engine whose capabilities have `stages`."""
        await cast(StagingEngine, self.engine).stage(update)

    async def publish(self, update: WeightUpdate) -> None:
        self.newest = update.version
        await self.engine.publish(update)

    async def abort(self, prompt_uid: int, samples: Collection[int] | None = None) -> None:
        if samples is None:
            await self.engine.abort(prompt_uid)
        else:
            await self.engine.abort(prompt_uid, samples)

    async def health(self) -> Health:
        return await self.engine.health()

    def stop_waiting(self) -> None:
        """See `proxima.engine.protocol.stop_waiting`."""
        stop_waiting(self.engine)

    def close(self) -> None:
        """Stop the processes that the engine has started."""
        close_engine(self.engine)


async def _limited(work: Awaitable[object], seconds: float) -> None:
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:  # not cancelled: that would also cancel whatever it waits for
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        message = f"did not end within {seconds:g} s; does it wait for the executor or for completions while it pauses?"
        raise TimeoutError(message)
    task.result()
