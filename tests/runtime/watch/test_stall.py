"""A run that stands still says what waits for whom, after virtual minutes."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from proxima.engine.protocol import Health
from proxima.rollout.generator import GroupGenerator, GroupSpec
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from proxima.runtime.watch.stall import StallWatch
from proxima.runtime.watch.timeline import Timeline
from tests.engine.helpers import engine, requests
from tests.runtime.loop.test_controller import World

MINUTE = 60.0


class Engine:
    """Counts a token a minute until `stands_at`, and answers health checks until `silent_at`."""

    def __init__(self, clock, stands_at=0.0, silent_at=float("inf"), counts=True):
        self.clock, self.stands_at, self.silent_at, self.counts = clock, stands_at, silent_at, counts

    async def health(self):
        if self.clock.now() >= self.silent_at:
            await asyncio.Event().wait()
        tokens = int(min(self.clock.now(), self.stands_at) // MINUTE) if self.counts else None
        return Health(ok=True, version=3, running=4, waiting=1, tokens=tokens, detail={"pid": 123})


class Scene:
    """A watch over an activity, for so many virtual minutes."""

    def __init__(self, tmp_path, seconds=10 * MINUTE, **facts):
        self.clock, self.told, self.heard = VirtualClock(), [], []
        self.rewards = SimpleNamespace(awaited={"code": [], "length": []})
        self.activity = Activity(self.clock, 0.0, Timeline(tmp_path / "timeline.json", print))
        self.generator = GroupGenerator(Engine(self.clock, **facts), self.rewards, GroupSpec(sampling=None), None)
        self.seconds = seconds

    def play(self, minutes, stages="step 7, generate", at=()):
        """What is told, and after how many minutes.

        Args:
            stages: names of the running ones, with their step.
            at: pairs of a minute and what happens then.
        """

        async def scene():
            warn = lambda text: self.told.append((self.clock.now() / MINUTE, text))  # noqa: E731
            watch = StallWatch(self.seconds, self.activity, warn, self.generator, self.heard.append)
            watching = asyncio.create_task(watch.run())
            for minute, act in [*at, (minutes, lambda: None)]:
                await asyncio.sleep(minute * MINUTE - self.clock.now())
                act()
            watching.cancel()

        with ExitStack() as stack:
            for stage in filter(None, stages.split(", ")):
                name, _, step = stage.partition(" ")
                stack.enter_context(self.activity.stage(name, **({"step": int(step)} if step else {})))
            run_virtually(scene(), self.clock)
        return self.told


def test_prompts_in_an_engine_that_samples_no_token(tmp_path):
    scene = Scene(tmp_path)
    scene.activity.enqueued([41, 42, 45])
    reports = scene.play(75)
    assert [at for at, _ in reports] == [10, 20, 40]  # the waits double
    assert reports[0][1] == (
        "no token and no finished stage for 10 min: step 7 waits for 3 prompts (41, 42, 45) in the engine (process "
        "123, 4 completions run and 1 wait, last health check 0 s ago)"
    )


def test_tokens_are_signs_of_life_and_start_again(tmp_path):
    scene = Scene(tmp_path, stands_at=30 * MINUTE)
    scene.activity.enqueued([1])
    reports = scene.play(100, at=[(62, lambda: scene.activity.generated(1))])
    assert [at for at, _ in reports] == [40, 50, 72, 82]
    assert "prompt 1 in the engine" in reports[0][1]
    assert [health.tokens for health in scene.heard[:4]] == [1, 2, 3, 4]  # a tenth of the time between two looks


@pytest.mark.parametrize(
    ("silent_at", "stages", "sentence"),
    [
        (4, "step 7, publish", "step 7 waits for the engine (process 123, no answer to a health check for 8 min)"),
        (
            0,
            "evaluate 4",
            "no finished stage for 11 min: the evaluation after step 4 waits for the engine (no answer to a health "
            "check for 11 min)",
        ),
    ],
)
def test_an_engine_that_does_not_answer(silent_at, stages, sentence, tmp_path):
    ((_, told),) = Scene(tmp_path, silent_at=silent_at * MINUTE).play(12, stages)
    assert told.endswith(sentence)


def test_processes_that_die_one_after_the_other_are_no_sign_of_life(tmp_path):
    scene = Scene(tmp_path)
    answers = [Health(ok=True, version=3, tokens=500), Health(ok=False, version=3, detail={"pid": 124, "exits": 1})]
    answers += [Health(ok=True, version=3, tokens=0), answers[1]] * 20

    async def health():
        return answers.pop(0)

    scene.generator.engine.health = health
    scene.activity.enqueued([1])
    reports = scene.play(25)
    assert [at for at, _ in reports] == [13, 23]  # the new process counts from 0 again: that is another figure, once


def test_a_reward_that_does_not_answer(tmp_path):
    scene = Scene(tmp_path, counts=False)
    scene.activity.enqueued([41, 42])
    scene.rewards.awaited["code"] = [41]
    reports = scene.play(14, at=[(1, lambda: scene.activity.generated(41)), (1, lambda: scene.activity.scored(42))])
    assert [text for _, text in reports] == [
        "no finished stage for 10 min: step 7 waits for the reward `code` of prompt 41 since 10 min"
    ]


def test_work_of_this_process(tmp_path):
    scene = Scene(tmp_path)
    assert scene.play(13, "step 3, train", [(2, lambda: scene.activity.advanced(3000, 8000, "tokens"))]) == [
        (
            12,
            "no token and no finished stage for 10 min: step 3 waits for its stage `train`, started 12 min ago, which "
            "has done 3,000 of 8,000 tokens",
        )
    ]
    scene = Scene(tmp_path)
    scene.generator = None
    ((_, told),) = scene.play(11, "checkpoint 3")
    assert told == (
        "no finished stage for 10 min: the checkpoint of step 3 waits for its stage `checkpoint`, started 10 min ago, "
        "progress unknown"
    )


def test_an_engine_that_does_not_start(tmp_path):
    world = World(tmp_path / "run", "runtime.stall_seconds=60", clock=VirtualClock())

    async def pause():
        await asyncio.Event().wait()

    async def stopped():
        world.engine.pause = pause
        run = asyncio.ensure_future(world.controller.run())
        await asyncio.sleep(61)
        run.cancel()

    run_virtually(stopped(), world.clock)
    assert world.observer.warnings == [
        "no token and no finished stage for 60 s: the run waits for the engine (2 completions run and 0 wait, last "
        "health check 0 s ago)"
    ]


def test_off(tmp_path):
    assert Scene(tmp_path, seconds=0).play(1000, stages="") == []


def test_a_run_whose_reward_hangs(tmp_path):
    clock = VirtualClock()
    world = World(tmp_path / "run", "runtime.stall_seconds=60", "train.steps=1", clock=clock, rewards={"hang_on": 1})
    world.engine.clock.advance = lambda seconds: None

    async def stopped():
        run = asyncio.ensure_future(world.controller.run())
        await asyncio.sleep(300)
        world.controller.stop()
        return await run

    assert run_virtually(stopped(), clock) is False and clock.now() == 300  # and the watch has ended with the run
    assert world.observer.warnings == [
        f"no token and no finished stage for {lasted}: step 1 waits for the reward `even` of prompt 1 since {lasted}"
        for lasted in ("60 s", "2 min", "4 min")
    ]


def test_the_local_engine_counts_its_tokens():
    made = engine()

    async def generate():
        before = await made.health()
        tokens = sum([len(completion.tokens) async for completion in made.generate(requests(2, 2))])
        return before, await made.health(), tokens

    before, after, tokens = asyncio.run(generate())
    assert before.tokens == 0 and after.tokens == tokens > 0
