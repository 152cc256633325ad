"""The hooks of an executor: who calls them, and what they may not call."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal["pre_pause", "post_pause", "pre_resume", "post_resume"]
Hook = Callable[[], object]  # its result is awaited if it is awaitable
RemoveHook = Callable[[], None]


@dataclass(eq=False)
class HookCall:
    """The hook call that is in progress, visible to the code that the hook calls."""

    hooks: "PauseHooks"
    stage: Stage
    name: str
    running: bool = True


_CALL: ContextVar[HookCall | None] = ContextVar("hook_call", default=None)


class PauseHooks:
    """Hooks by stage; they run one after the other in the order of registration."""

    def __init__(self) -> None:
        self._hooks: dict[Stage, dict[object, Hook]] = {stage: {} for stage in get_args(Stage)}

    def register(self, stage: Stage, hook: Hook) -> RemoveHook:
        """Add a hook; returns a function that removes it."""
        place, hooks = object(), self._hooks[stage]  # the same hook may have several
        hooks[place] = hook

        def remove() -> None:
            hooks.pop(place, None)

        return remove

    async def call(self, stage: Stage, seconds: Callable[[], float]) -> list[tuple[str, Exception]]:
        """Call the hooks of a stage, each for at most `seconds()`, as it is when that one begins; returns name and
        exception of those that fail."""
        hooks, failures = self._hooks[stage], list[tuple[str, Exception]]()
        for place, hook in list(hooks.items()):
            if place not in hooks:  # removed by an earlier hook
                continue
            call = HookCall(self, stage, getattr(hook, "__qualname__", repr(hook)))
            token = _CALL.set(call)
            try:
                if inspect.isawaitable(result := hook()):
                    await _limited(result, seconds())
            except Exception as error:
                failures.append((call.name, error))
            finally:
                call.running = False
                _CALL.reset(token)
        return failures

    def refuse_call(self, method: str, stages: Sequence[Stage]) -> None:
        """Raise RuntimeError if a hook of one of the stages, of any without stages, calls a method that would wait for
        that hook to end."""
        call = _CALL.get()
        if call is not None and call.running and call.hooks is self and call.stage in (stages or get_args(Stage)):
            why = "completions that a paused engine never gives" if method == "generate" else "itself"
            raise RuntimeError(f"the {call.stage} hook {call.name} calls {method}() and would wait for {why}")


async def _limited(work: Awaitable[object], seconds: float) -> None:
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:  # not cancelled: that would also cancel whatever it waits for
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        message = f"did not end within {seconds:g} s; does it wait for completions of the paused engine?"
        raise TimeoutError(message)
    task.result()
