"""A taskset of verifiers, and a harness that asks once from the process itself: it needs neither uv nor a network."""

import random

import verifiers.v1 as vf
from openai import AsyncOpenAI


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def even(self, trace) -> float:
        return float(len((trace.last_reply or "").strip()) % 2 == 0)


class Adder(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(100):
            draw = random.Random(i)
            a, b = draw.randrange(10), draw.randrange(10)
            yield Task(Data(name=f"{i}", prompt=f"{a} + {b}?", answer=str(a + b)), self.config.task)


class OneChat(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        policy = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        await policy.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": prompt}])
        return vf.ProgramResult(0, "", "")


__all__ = ["Adder", "OneChat"]
