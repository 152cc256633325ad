"""Hooks around an engine's pauses: order, failures, removal, re-entrance, and hooks that would wait forever."""

import asyncio
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.engine.executor import Executor, HookError, Stage
from proxima.engine.local import collect
from proxima.engine.protocol import Engine, ScoreRequest
from tests.engine.helpers import engine, requests, run

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
    found = Executor(Quiet(), **settings)
    return found, found.engine.told


def register(found, stage, hook):
    return getattr(found, f"register_{stage}_hook")(hook)


def test_the_order_of_hooks_and_transitions():
    async def go():
        found, told = executor()
        for stage in STAGES:
            register(found, stage, lambda stage=stage: told.append(f"first {stage}"))

            async def second(stage=stage):
                await asyncio.sleep(0)
                told.append(f"second {stage}")

            register(found, stage, second)
        await found.pause("wait")
        await found.pause("abort")  # paused already: no hooks
        await found.resume()
        await found.resume()
        return told

    assert asyncio.run(go()) == [
        *("first pre_pause", "second pre_pause", "pause wait", "first post_pause", "second post_pause"),
        "pause abort",
        *("first pre_resume", "second pre_resume", "resume", "first post_resume", "second post_resume"),
        "resume",
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_hook_is_named_hides_no_other_and_the_executor_continues(stage):
    async def go():
        found, told = executor()

        def torn():
            raise ValueError("torn")

        async def lost():
            raise KeyError("lost")

        removals = [register(found, stage, hook) for hook in (torn, lambda: told.append("between"), lost)]
        with pytest.raises(HookError) as caught:
            await found.pause()
            await found.resume()
        error = caught.value
        assert error.stage == stage and [type(e) for _, e in error.failures] == [ValueError, KeyError]
        assert f"2 {stage} hooks failed: " in str(error)
        assert ".torn: ValueError: torn; " in str(error) and ".lost: KeyError: 'lost'" in str(error)
        expected = {
            "pre_pause": ["between"],
            "post_pause": ["pause keep", "between"],
            "pre_resume": ["pause keep", "between"],
            "post_resume": ["pause keep", "resume", "between"],
        }
        assert told == expected[stage]
        for remove in (removals[0], removals[2], removals[2]):  # twice does no harm
            remove()
        told.clear()
        await found.pause()
        await found.resume()
        return told

    told = asyncio.run(go())
    assert told[:2] != ["between", "between"] and told.count("resume") == 1


def test_a_hook_removed_by_one_before_it_does_not_run():
    async def go():
        found, told = executor()
        found.register_pre_pause_hook(lambda: remove())
        remove = found.register_pre_pause_hook(lambda: told.append("removed"))
        found.register_pre_pause_hook(lambda: found.register_pre_pause_hook(lambda: told.append("added")))
        await found.pause()
        assert told == ["pause keep"]
        await found.resume()
        await found.pause()
        return told

    assert asyncio.run(go()) == ["pause keep", "resume", "added", "pause keep"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", ["pause", "resume"])
def test_a_hook_that_pauses_or_resumes_is_refused_at_once(stage, method):
    async def go():
        found, _ = executor()

        async def nested():
            await asyncio.create_task(getattr(found, method)())  # in a task of its own it would hang just as well

        register(found, stage, nested)
        with pytest.raises(
            HookError, match=rf"the {stage} hook \S*nested calls {method}\(\) and would wait for itself"
        ):
            await found.pause()
            await found.resume()

    asyncio.run(asyncio.wait_for(go(), 120))


def test_two_tasks_that_pause_take_turns():
    async def go():
        found, told = executor()
        found.register_pre_pause_hook(lambda: told.append("hook"))
        await asyncio.gather(found.pause(), found.pause(), found.resume())
        return told

    assert asyncio.run(go()) == ["hook", "pause keep", "pause keep", "resume"]


def test_an_engine_that_can_not_pause_leaves_the_executor_running():
    async def go():
        found, told = executor()
        found.engine.failing = True
        with pytest.raises(ConnectionError):
            await found.pause()
        found.engine.failing = False
        found.register_post_pause_hook(lambda: told.append("paused"))
        await found.pause()
        return told

    assert asyncio.run(go()) == ["pause keep", "paused"]


def test_hooks_of_a_real_engine_may_score_but_not_wait_for_completions():
    asked = requests(2, 3, max_tokens=30)

    async def go():
        found: Engine = Executor(engine(slots=8))
        scores, task = [], asyncio.ensure_future(collect(found, asked))
        await asyncio.sleep(0)

        async def score():
            scores.append(await found.score([ScoreRequest(prompt_tokens=(1, 2), tokens=(3, 4))]))

        async def generate():
            found.hook_seconds = 0.2  # of the next hook, which can't end
            await collect(found, asked)

        async def wait():
            await task

        for hook in (score, generate, wait):
            found.register_post_pause_hook(hook)
        with pytest.raises(HookError) as caught:
            await found.pause()
        first, second = caught.value.failures
        assert "hook test_hooks" in str(first[1]) and "calls generate() and would wait for completions" in str(first[1])
        assert str(second[1]).startswith("did not end within 0.2 s; does it wait for completions")
        await found.resume()
        assert len(scores) == 1
        return await task

    assert asyncio.run(asyncio.wait_for(go(), 120)) == run(engine(slots=8), asked)


def test_what_a_hook_started_may_pause_later():
    async def go():
        found, told = executor()
        started = []

        async def later():
            while found._paused:
                await asyncio.sleep(0)
            await found.pause("wait")

        found.register_post_pause_hook(lambda: started or started.append(asyncio.create_task(later())))
        await found.pause()
        await found.resume()
        await started[0]
        return told

    assert asyncio.run(go()) == ["pause keep", "resume", "pause wait"]


@given(st.lists(st.tuples(st.sampled_from(STAGES), st.booleans()), max_size=6), st.lists(st.booleans(), max_size=12))
def test_any_calls_and_failures_leave_an_executor_that_pauses_and_resumes(hooks, calls):
    """Each transition that is not stopped reaches the engine, and the engine's state is the executor's."""

    async def go():
        found, told = executor()
        for stage, fails in hooks:
            register(found, stage, (lambda: 1 / 0) if fails else (lambda: None))
        paused = False
        failing = {stage for stage, fails in hooks if fails}
        for pause in calls:
            changes, before = pause != paused, len(told)
            stages = ("pre_pause", "post_pause") if pause else ("pre_resume", "post_resume")
            stopped = changes and stages[0] in failing
            try:
                await (found.pause() if pause else found.resume())
                assert not (changes and failing & set(stages))
            except HookError as error:
                assert changes and error.stage == (stages[0] if stopped else stages[1])
            assert len(told) == before + (not stopped)
            paused = paused if stopped else pause
            assert found._paused == paused

    asyncio.run(go())
