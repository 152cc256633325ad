"""An agent of the OpenAI Agents SDK, as a program: one episode, from a row on stdin to a reward on stdout."""

import json
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


row = json.load(sys.stdin)
model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI(max_retries=0))
agent = Agent(name="adder", instructions="Use the tool, then give the number.", model=model, tools=[add])
result = Runner.run_sync(agent, row["messages"][-1]["content"], max_turns=4)
print(float(str(row["answer"]) in str(result.final_output)))
