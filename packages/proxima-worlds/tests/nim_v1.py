"""An environment of verifiers with two agents: each says a word, the second after it has read the first's; and one of
whom the second is not to be trained. Their harness is that of `adder_v1`."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Task(vf.Task[Data]):
    pass


class Nim(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(40):
            yield Task(Data(name=f"{i}", prompt=f"Say {i}.", answer=str(i)), self.config.task)


class TwoConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "adder_v1"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "adder_v1"})
    attempts: int = 1
    trained: bool = True


class Two(vf.Env[TwoConfig]):
    """Who says more letters wins; of several attempts of the second, each is compared with the first."""

    async def setup(self, agents):
        agents.second.trainable = self.config.trained

    async def run(self, task, agents):
        first = await agents.first.run(task)
        for _ in range(self.config.attempts):
            heard = vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"Say more than {first.last_reply}."))
            await agents.second.run(heard)

    async def finalize(self, task, episode):
        first, *others = episode.traces
        said = len((first.last_reply or "").strip())
        for trace in others:
            length = len((trace.last_reply or "").strip())
            trace.record_reward("longer", float(length > said))
        first.record_reward("longer", float(all(len((t.last_reply or "").strip()) <= said for t in others)))


__all__ = ["Nim", "Two"]
