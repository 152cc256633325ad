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
        return Health()


def publisher():
    async def run(call):
        return call()

    stack = SimpleNamespace(gathered=lambda: SimpleNamespace(model=object()))
    learner = SimpleNamespace(compute=SimpleNamespace(run=run), stack=stack)
    folder = SimpleNamespace(engine_log=SimpleNamespace(name="engine.log"))
    services = SimpleNamespace(store=SimpleNamespace(folder=folder, activity=None), observer=None)
    return Publisher(SimpleNamespace(engine=Executor(Fails())), learner, services, DeviceTurns())


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
