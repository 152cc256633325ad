"""The loop with fakes around it: who stands where when, what time it took, and what happens when a part fails or
hangs."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod

import pytest

from proxima.config.resolution import resolve
from proxima.data.flow import Completion, Prompt, Score
from proxima.data.pending import Pending
from proxima.engine.protocol import Capabilities, Health, Sampling
from proxima.evaluation.held_out import Evaluation
from proxima.model.compute_thread import ComputeThread
from proxima.rollout.generator import GroupGenerator, GroupSpec
from proxima.runtime.launch.learning import make_batch_builder, make_learner
from proxima.runtime.launch.rl_workload import device_turns, make_collector, training_groups
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import Publisher
from proxima.runtime.loop.training_loop import RunEnded, RunServices
from proxima.runtime.resume.rewind import RestoredJournal
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.store import RolloutRecorder, RunStore
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.disk import Disk
from proxima.runtime.watch.timeline import Timeline
from proxima.task.prompts import Cursor, PromptSource
from proxima.training.checkpoint import checkpoints
from proxima.training.stack import UpdateResult
from tests.manual_clock import ManualClock
from tests.model.rows import ids, loaded
from tests.runtime.tiny_run import Watcher


@dataclass
class FakeEngine:
    """Completions made up from (uid, sample, version); the settings make trouble."""

    clock: ManualClock
    journal: RestoredJournal
    seconds: float = 0.0
    hang: bool = False
    sleeps: bool = False
    calls: list = field(default_factory=list)
    version: int = -1
    seen: list = field(default_factory=list)

    async def generate(self, requests):
        self.seen.append(self.journal.counts())
        if self.hang:
            await asyncio.Event().wait()
        self.clock.advance(self.seconds)
        for request in reversed(requests):
            await asyncio.sleep(0)
            uid, sample = request.prompt.uid, request.sample
            tokens = ids(2 + (uid + sample) % 3, 100 * uid + sample)
            made_up = {"sampled_log_prob": -5.0, "untruncated_log_prob": -5.0, "policy_version": self.version}
            yield replace(Completion.of_text(uid, sample, f"{uid}.{sample}", tokens), **made_up)

    async def publish(self, update):
        self.version = update.version
        self.calls.append(("publish", update.version))
        if update.version:
            self.clock.advance(0.5)

    async def health(self):
        return Health(ok=True, version=self.version, running=2, tokens=7)

    @property
    def capabilities(self):
        return Capabilities(sleeps=self.sleeps)

    async def _note(self, call):
        self.calls.append(call)

    sleep, wake = partialmethod(_note, "sleep"), partialmethod(_note, "wake")
    pause, resume = partialmethod(_note, "pause"), partialmethod(_note, "resume")


class FakeRewards:
    """Half the samples right. `hang_on` never answers for a prompt."""

    has_batch = False

    def __init__(self, journal, hang_on=None):
        self.journal, self.hang_on, self.seen = journal, hang_on, []
        self.awaited = {"even": [] if hang_on is None else [hang_on]}

    async def score(self, prompt, completions):
        self.seen.append((prompt.uid, self.journal.state_of(prompt.uid)))
        if prompt.uid == self.hang_on:
            await asyncio.Event().wait()
        return [Score(value=c.sample % 2, correct=c.sample % 2 == 1) for c in completions]

    def close(self):
        pass


SETTINGS = (
    *("seed=1", "train.steps=2", "train.warmup_steps=0", "eval.every=0", "checkpoint.every=0"),
    *(
        "train.prompts_per_step=3",
        "train.completions_per_prompt=4",
        "train.updates_per_step=1",
        "sampling.max_tokens=5",
    ),
    "algorithm={preset: grpo, mismatch: {on_mismatch: warn}}",  # the engine's log-probs are made up
    *("runtime.stall_seconds=0", "runtime.max_unscored_steps=0"),
)


class World:
    """The controller of a recipe, and everything that it touches; `words` change `SETTINGS`."""

    def __init__(self, path, *words, engine=None, rewards=None, evaluation=False, clock=None):
        self.clock, self.folder = clock or ManualClock(), RunFolder(path)
        self.folder.begin()
        self.journal = RestoredJournal(self.folder.journal, self.clock)
        self.engine = FakeEngine(self.clock, self.journal, **(engine or {}))
        self.rewards = FakeRewards(self.journal, **(rewards or {}))
        self.observer = Watcher()
        store = RunStore(
            self.journal,
            self.folder,
            Disk(self.folder.path, self.observer.warning),
            Activity(self.clock, 0.0, Timeline(self.folder.timeline, self.observer.warning)),
        )
        values = dict(word.split("=", 1) for word in (*SETTINGS, *words))
        config = resolve("quickstart", [f"{name}={value}" for name, value in values.items()]).config
        services = RunServices(store, ComputeThread(), self.observer, ExitStack())
        model = loaded("llama")
        rows = config.task.rows(config.seed)
        self.source = PromptSource(rows, model.tokenizer, context=model.max_length, cursor=Cursor(len(rows), 1))
        weights = config.model.source(config.seed, config.placement)
        learner = make_learner(config, weights, model, services.compute, engines={})
        self.stack = learner.stack
        builder = make_batch_builder(config, learner)
        generator = GroupGenerator(self.engine, self.rewards, training_groups(config), self.clock.now)
        recorder = RolloutRecorder(store, self.source, self.observer)
        reject = partial(services.compute.run, builder.reject)
        collector = make_collector(config, generator, self.source, recorder, reject, Pending(), 0)
        questions = [Prompt(uid=1000 + i, messages=(), tokens=(4, 5)) for i in range(3)]
        greedy = GroupGenerator(self.engine, self.rewards, GroupSpec(sampling=Sampling(temperature=0)), self.clock.now)
        evaluations = {"": Evaluation(questions, greedy, self.observer.progress)} if evaluation else {}
        publisher = Publisher(generator, learner, services, device_turns(config.placement, generator, learner))
        self.controller = Controller(config, collector, builder, learner, publisher, evaluations, services)

    def run(self):
        async def run():
            self.loop = asyncio.get_running_loop()
            return await asyncio.wait_for(self.controller.run(), 600)

        return asyncio.run(run())

    def records(self, kind="train"):
        return [r for r in self.folder.read_metrics() if r["kind"] == kind]

    def weights(self):
        return [p.detach().clone() for p in self.stack.parameters]


def test_the_state_of_prompts_at_each_stage(tmp_path):
    world = World(tmp_path / "run", engine={"sleeps": True})  # it has devices of its own, and stays awake
    at_update = []
    inner = world.controller.update

    async def update(batch, collected):
        at_update.append(world.journal.counts())
        return await inner(batch, collected)

    world.controller.update = update
    assert world.run() is True
    assert world.engine.seen == [{"generating": 3}, {"consumed": 3, "generating": 3}]
    assert [state for _, state in world.rewards.seen] == ["generating"] * 6
    assert at_update == [{"selected": 3}, {"consumed": 3, "selected": 3}]
    assert world.journal.counts() == {"consumed": 6} and world.journal.step == 2
    assert world.engine.calls == [call for n in range(3) for call in ("pause", ("publish", n), "resume")]
    assert [r["policy_version"] for r in world.records()] == [1, 2]
    rows = read_rows(world.folder.rollout_file(2))
    assert {v for row in rows for v in row["policy_version"]} == {1}


SHARED = ("placement={kind: ray, ranks: 2, engines: 1, colocate: true}", "engine=vllm")


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_on_the_devices_of_the_trainer_sleeps_during_updates(sleeps, tmp_path):
    world = World(tmp_path / "run", *SHARED, "eval.every=1", engine={"sleeps": sleeps}, evaluation=True)
    inner, release = world.stack.update, world.stack.release
    world.stack.update = lambda *a, **k: world.engine.calls.append("update") or inner(*a, **k)
    world.stack.release = lambda: world.engine.calls.append("release") or release()
    world.run()
    first = ["pause", ("publish", 0), "resume"]
    asleep = [["pause", "sleep", "update", "pause", "release", "wake", ("publish", n), "resume"] for n in (1, 2)]
    awake = [["update", "pause", ("publish", n), "resume"] for n in (1, 2)]
    assert world.engine.calls == sum(asleep if sleeps else awake, first)


def test_a_step_without_an_update_wakes_the_engine_too(tmp_path):
    world = World(tmp_path / "run", *SHARED, "train.steps=1", engine={"sleeps": True})
    world.stack.update = lambda *a, **k: UpdateResult()
    with pytest.raises(RunEnded, match="no step of 1 trained anything"):
        world.run()
    assert world.engine.calls[3:] == ["pause", "sleep", "wake", "resume"]
    assert [r["policy_version"] for r in world.records()] == [0]


def test_times_are_of_the_injected_clock(tmp_path):
    world = World(tmp_path / "run", engine={"seconds": 2.0})
    inner = world.stack.update
    world.stack.update = lambda *a, **k: world.clock.advance(4.0) or inner(*a, **k)
    world.run()
    for i, r in enumerate(world.records(), start=1):
        times = [r[f"time/{stage}"] for stage in ("generate", "train", "publish", "step")]
        assert times == [2.0, 4.0, 0.5, 6.5] and r["time"] == 6.5 * i
        assert r["tokens_per_second/generate"] == r["tokens/generated"] / 2
        assert r["tokens_per_second/train"] == r["tokens/trained"] / 4
    assert world.controller.now() == 13.0


def test_the_time_of_generation_is_without_that_of_scoring(tmp_path):
    world = World(tmp_path / "run", "train.steps=1", engine={"seconds": 2.0})
    inner = world.controller.collect

    async def collect(step):
        return replace(await inner(step), scoring_seconds=0.5)

    world.controller.collect = collect
    world.run()
    (record,) = world.records()
    assert (record["time/generate"], record["time/score"]) == (1.5, 0.5)


@pytest.mark.parametrize(
    "trouble", [{"engine": {"hang": True}}, {"engine": {"hang": True}, "evaluation": True}, {"rewards": {"hang_on": 1}}]
)
def test_a_stop_does_not_wait_for_what_hangs(trouble, tmp_path):
    world = World(tmp_path / "run", **trouble)

    async def go():
        task = asyncio.ensure_future(world.controller.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        world.controller.stop()
        return await asyncio.wait_for(task, 120)

    assert asyncio.run(go()) is False
    assert world.journal.step == 0 and checkpoints(world.folder.checkpoints) == []


def test_a_stop_during_the_first_update_ends_after_that_step(tmp_path):
    world = World(tmp_path / "run", "train.steps=5", "eval.before=false", evaluation=True)
    inner = world.stack.update

    def update(*arguments, **options):
        world.loop.call_soon_threadsafe(world.controller.stop)
        return inner(*arguments, **options)

    world.stack.update = update
    assert world.run() is False
    assert world.journal.step == 1 and [c.step for c in checkpoints(world.folder.checkpoints)] == [1]
    assert (
        checkpoints(world.folder.checkpoints)[0].facts["cursor"]["cursor"]["drawn"] == 3 and world.records("eval") == []
    )


NEITHER = ("eval.before=false", "eval.after=false")
BOTH = [(0, "before"), (2, "step"), (4, "step"), (5, "after")]
SCHEDULES = [  # the settings; the evaluations, the checkpoints
    (("train.steps=5", "eval.every=2", "checkpoint.every=3", "checkpoint.keep_last=0"), BOTH, [3, 5]),
    (("train.steps=4", "eval.every=4", *NEITHER), [(4, "after")], [4]),
    (("train.steps=1", *NEITHER), [], [1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "evaluations", "saved"), SCHEDULES)
def test_when_evaluations_and_checkpoints_are_made(words, evaluations, saved, tmp_path):
    world = World(tmp_path / "run", *words, evaluation=True)
    world.run()
    assert [(r["step"], r["label"]) for r in world.records("eval")] == evaluations
    assert all(r["accuracy"] == 0.0 and r["questions"] == 3 for r in world.records("eval"))
    assert [c.step for c in checkpoints(world.folder.checkpoints)] == saved
