"""What reaches the engine with new weights, and when an engine that can't take them ends the run."""

import asyncio
from types import SimpleNamespace

import pytest

from proxima.data import UserError
from proxima.engine.executor import Executor
from proxima.engine.protocol import Capabilities, Health, ServerError
from proxima.runtime.loop.publisher import DeviceTurns, Publisher
from proxima.runtime.loop.training_loop import RunEnded


class Fails:
    """An engine that takes no weights."""

    capabilities = Capabilities()

    def __init__(self):
        self.asked = 0

    async def pause(self, mode):
        pass

    async def publish(self, update):
        raise ServerError("http://server", "/load", f"no room for version {update.version}")

    async def health(self):
        self.asked += 1
        return Health(ok=True, version=0)


class Stages(Fails):
    """An engine that takes weights, and says what it is told."""

    capabilities = Capabilities(stages=True)

    def __init__(self):
        super().__init__()
        self.told = []

    async def stage(self, update):
        self.told.append(("stage", update))

    async def pause(self, mode):
        self.told.append(("pause", None))

    async def publish(self, update):
        self.told.append(("publish", update))

    async def resume(self):
        self.told.append(("resume", None))


def publisher(engine=None, turns=None):
    async def run(call):
        return call()

    stack = SimpleNamespace(gathered=lambda: SimpleNamespace(model=object()), changes=0)
    learner = SimpleNamespace(compute=SimpleNamespace(run=run), stack=stack)
    folder = SimpleNamespace(engine_log=SimpleNamespace(name="engine.log"))
    activity = SimpleNamespace(published=lambda version: None)
    services = SimpleNamespace(store=SimpleNamespace(folder=folder, activity=activity), observer=None)
    generator = SimpleNamespace(engine=Executor(engine or Fails()))
    return Publisher(generator, learner, services, turns or DeviceTurns())


def test_an_engine_stages_the_weights_before_its_pause():
    engine = Stages()
    asyncio.run(publisher(engine).publish(1, 1, deferring=False))
    calls, (staged, _, published, _) = zip(*engine.told, strict=True)
    assert calls == ("stage", "pause", "publish", "resume") and staged is published


def test_an_engine_on_the_trainer_s_devices_is_paused_first():
    engine, turns = Stages(), DeviceTurns()
    turns.shared = True
    asyncio.run(publisher(engine, turns).publish(1, 1, deferring=False))
    assert [call for call, _ in engine.told] == ["pause", "publish", "resume"]


def test_the_first_weights_that_can_t_be_taken_are_an_error_of_the_user():
    with pytest.raises(UserError, match=": no room for version 0; repair the engine and resume") as raised:
        asyncio.run(publisher().publish(0, 0, deferring=False))
    assert not isinstance(raised.value, RunEnded)


def test_later_ones_end_the_run_after_the_step_and_spare_the_engine():
    made = publisher()
    asyncio.run(made.publish(4, 3, deferring=True))
    assert made.generator.engine.newest == 4  # the engine may have some of them
    asyncio.run(made.check_health(3))
    assert made.generator.engine.engine.asked == 0
    with pytest.raises(RunEnded, match=r"after step 3: .*version 4; repair the engine and resume \(--resume\)$"):
        made.end_if_failed()
