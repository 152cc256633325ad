"""Hooks around an engine's pauses: order, failures, removal, and hooks that would wait forever."""

import asyncio
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.engine.executor import Executor, HookError, Stage
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.helpers import engine, requests

STAGES = get_args(Stage)


class Quiet:
    """Remembers what it is told, and fails when asked to."""

    def __init__(self):
        self.told, self.failing = [], False

    async def pause(self, mode="keep"):
        await asyncio.sleep(0)
        if self.failing:
            raise ConnectionError("the server is gone")
        self.told.append(f"pause {mode}")

    async def resume(self):
        await asyncio.sleep(0)
        self.told.append("resume")


def executor(**settings):
    executor = Executor(Quiet(), **settings)
    return executor, executor.engine.told


def register(engine, stage, hook):
    return getattr(engine, f"register_{stage}_hook")(hook)


async def test_the_order_of_hooks_and_transitions():
    hooked, events = executor()
    for stage in STAGES:
        register(hooked, stage, lambda stage=stage: events.append(f"first {stage}"))

        async def second(stage=stage):
            await asyncio.sleep(0)
            events.append(f"second {stage}")

        register(hooked, stage, second)
    await hooked.pause("wait")
    await hooked.pause("abort")  # paused already: no hooks
    await hooked.resume()
    await hooked.resume()
    assert events == [
        *("first pre_pause", "second pre_pause", "pause wait", "first post_pause", "second post_pause"),
        "pause abort",
        *("first pre_resume", "second pre_resume", "resume", "first post_resume", "second post_resume"),
        "resume",
    ]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("pre_pause", ["between"]),
        ("post_pause", ["pause keep", "between"]),
        ("pre_resume", ["pause keep", "between"]),
        ("post_resume", ["pause keep", "resume", "between"]),
    ],
)
async def test_a_failing_hook_is_named_hides_no_other_and_the_executor_continues(stage, expected):
    hooked, events = executor()

    def torn():
        raise ValueError("torn")

    async def lost():
        raise KeyError("lost")

    removals = [register(hooked, stage, hook) for hook in (torn, lambda: events.append("between"), lost)]
    with pytest.raises(HookError) as caught:
        await hooked.pause()
        await hooked.resume()
    error = caught.value
    assert error.stage == stage and [type(e) for _, e in error.failures] == [ValueError, KeyError]
    assert f"2 {stage} hooks failed: " in str(error)
    assert ".torn: ValueError: torn; " in str(error) and ".lost: KeyError: 'lost'" in str(error)
    assert events == expected
    for remove in (removals[0], removals[2], removals[2]):  # twice does no harm
        remove()
    events.clear()
    await hooked.pause()
    await hooked.resume()
    assert events[:2] != ["between", "between"] and events.count("resume") == 1


async def test_a_hook_removed_by_one_before_it_does_not_run():
    hooked, events = executor()
    hooked.register_pre_pause_hook(lambda: remove())
    remove = hooked.register_pre_pause_hook(lambda: events.append("removed"))
    hooked.register_pre_pause_hook(lambda: hooked.register_pre_pause_hook(lambda: events.append("added")))
    await hooked.pause()
    assert events == ["pause keep"]
    await hooked.resume()
    await hooked.pause()
    assert events == ["pause keep", "resume", "added", "pause keep"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_hook_that_waits_for_the_executor_fails_in_time(stage):
    hooked, events = executor(hook_seconds=0.02)
    remove = register(hooked, stage, lambda: hooked.pause())
    with pytest.raises(HookError, match=r"did not end within 0\.02 s; does it wait for the executor"):
        await hooked.pause()
        await hooked.resume()
    remove()
    await hooked.pause()
    await hooked.resume()
    assert events[-1] == "resume"


async def test_two_tasks_that_pause_take_turns():
    hooked, events = executor()
    hooked.register_pre_pause_hook(lambda: events.append("hook"))
    await asyncio.gather(hooked.pause(), hooked.pause(), hooked.resume())
    assert events == ["hook", "pause keep", "pause keep", "resume"]


@pytest.mark.slow
async def test_hooks_of_a_real_engine_may_score_but_not_wait_for_completions():
    asked, executor = requests(2, 3, max_tokens=30), Executor(engine())
    scores, task = [], asyncio.ensure_future(collect(executor, asked))
    await asyncio.sleep(0)

    async def score():
        scores.append(await executor.score([ScoreRequest(prompt_tokens=(1, 2), tokens=(3, 4))]))
        executor.hook_seconds = 0.2  # of the other two, which can't end

    async def generate():
        await collect(executor, asked)

    async def wait():
        await task

    for hook in (score, generate, wait):
        executor.register_post_pause_hook(hook)
    with pytest.raises(HookError) as caught:
        await executor.pause()
    assert [name.rpartition(".")[2] for name, _ in caught.value.failures] == ["generate", "wait"]
    assert all(str(error).startswith("did not end within 0.2 s; does it wait") for _, error in caught.value.failures)
    await executor.resume()
    assert len(scores) == 1
    assert await task == await collect(engine(), asked)


async def test_what_a_hook_started_may_pause_later():
    hooked, events = executor()
    started = []

    async def later():
        while hooked._paused:
            await asyncio.sleep(0)
        await hooked.pause("wait")

    hooked.register_post_pause_hook(lambda: started or started.append(asyncio.create_task(later())))
    await hooked.pause()
    await hooked.resume()
    await started[0]
    assert events == ["pause keep", "resume", "pause wait"]


CALLS = st.tuples(st.booleans(), st.booleans())  # a pause, at which the engine fails


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(STAGES), st.booleans()), max_size=6), st.lists(CALLS, max_size=12))
def test_any_calls_and_failures_leave_an_executor_that_pauses_and_resumes(hooks, calls):
    """Each transition that is not stopped reaches the engine, and the engine's state is the executor's."""
    asyncio.run(follow(hooks, calls))


async def follow(hooks, calls):
    hooked, events = executor()
    for stage, fails in hooks:
        register(hooked, stage, (lambda: 1 / 0) if fails else (lambda: None))
    paused = False
    failing = {stage for stage, fails in hooks if fails}
    for pause, hooked.engine.failing in calls:
        changes, before = pause != paused, len(events)
        stages = ("pre_pause", "post_pause") if pause else ("pre_resume", "post_resume")
        stopped = changes and stages[0] in failing
        try:
            await (hooked.pause() if pause else hooked.resume())
            assert not (changes and failing & set(stages))
        except HookError as error:
            assert changes and error.stage == (stages[0] if stopped else stages[1])
        except ConnectionError:
            assert pause and hooked.engine.failing and not stopped
            stopped = True
        assert len(events) == before + (not stopped)
        paused = paused if stopped else pause
        assert hooked._paused == paused
