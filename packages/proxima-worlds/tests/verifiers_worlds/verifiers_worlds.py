"""Environments of the library verifiers, one of each kind that its public API makes, and broken ones."""

import asyncio
import sys
import time

import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "Begin.", "answer": "7"}])


def exact(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def letters(completion) -> float:
    return float(len(completion[-1]["content"]))


class HigherLower(vf.MultiTurnEnv):
    """Answers with a hint until the number is found."""

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "found"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"higher, after {len(state['trajectory'])}"}]


class Rewrites(HigherLower):
    """Shows the last answer only."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if len(messages) < 3 else [messages[0], messages[-1]]


class Counter(vf.StatefulToolEnv):
    """Has a count for each episode, which its tool gets besides what the model gives."""

    async def setup_state(self, state, **kwargs):
        state["count"] = [0]
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "count": state["count"]}


def add(by: int, count: list) -> str:
    """Add to the count.

    Args:
        by: the number to add
        count: the count so far
    """
    count[0] += by
    return f"{count[0]} now"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any integer
    """
    return 2 * number


def counted(state) -> float:
    return float(state["count"][0])


def count_of_messages(completion) -> float:
    return 0.25 + len(completion)


def broken(completion) -> float:
    raise RuntimeError("no\nscore")


async def not_a_number(completion):
    return {"a": 1.0}


def nan(completion) -> float:
    return float("nan")


def leaves(completion) -> float:
    sys.exit("goodbye")


def sleeps(completion) -> float:
    time.sleep(1000)
    return 0.0


class Silent(vf.SingleTurnEnv):
    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        state["completion"], state["is_completed"] = [{"role": "assistant", "content": "7"}], True
        return state


class Failing(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        raise vf.InfraError("no disk")


class Crashing(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        raise ZeroDivisionError("by zero")


class Hanging(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        await asyncio.sleep(1000)


def load_environment(kind: str = "single") -> vf.Environment:
    given = {"dataset": ROWS, "rubric": vf.Rubric(funcs=[exact, letters], weights=[1.0, 0.1])}
    if kind == "single":
        return vf.SingleTurnEnv(**given, system_prompt="Be brief.")
    if kind in ("multi", "rewrites"):
        return (HigherLower if kind == "multi" else Rewrites)(**given, max_turns=4)
    if kind == "tools":
        return vf.ToolEnv(**given, tools=[double], max_turns=4)
    if kind == "stateful":
        environment = Counter(dataset=ROWS, rubric=vf.Rubric(funcs=[counted]), max_turns=4)
        environment.add_tool(add, args_to_skip=["count"])
        return environment
    if kind == "counted":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[count_of_messages]))
    if kind == "multi_nan":
        return HigherLower(dataset=ROWS, rubric=vf.Rubric(funcs=[exact, nan]), max_turns=4)
    if kind in ("nan", "leaves", "sleeps"):
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[exact, globals()[kind]]))
    if kind in ("broken", "logged"):
        rubric = vf.Rubric(funcs=[exact, broken, not_a_number], weights=[1.0, float(kind == "broken"), 0.0])
        return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
    return {"failing": Failing, "crashing": Crashing, "hanging": Hanging, "silent": Silent}[kind](**given)
