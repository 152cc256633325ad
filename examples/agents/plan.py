"""A hierarchy: a planner splits a sum into two smaller ones, and a worker does each of them. One policy
is both.

proxima train examples/agents/plan.yaml        # in a checkout
"""

import re

from openai import AsyncOpenAI

PLANNER = "Split the second number of a sum into two numbers that add up to it. Reply with only the two numbers."
WORKER = "Reply with only the number."


def numbers(text):
    return [int(found) for found in re.findall(r"\d{1,9}", text or "")]


async def play(row, base_url, api_key, model):
    """One episode. The planner gains .25 for two numbers, .25 more if they add up, and .5 more if the worker reaches
    the sum by them. The worker gains the share of its steps that are right, whatever it was given."""
    first, second = numbers(row["messages"][-1]["content"])[:2]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(player, rule, question):
            messages = [{"role": "system", "content": rule}, {"role": "user", "content": question}]
            answer = await client.chat.completions.create(model=f"{model}/{player}", messages=messages)
            return numbers(answer.choices[0].message.content)

        parts = await ask("planner", PLANNER, f"{first} + {second}")
        if len(parts) != 2:
            return {"planner": 0.0, "worker": 0.0}
        if sum(parts) != second:
            return {"planner": 0.25, "worker": 0.0}
        total = first
        right = 0
        for part in parts:
            said = await ask("worker", WORKER, f"What is {total} + {part}?")
            given = said[-1] if said else total
            right += given == total + part
            total = given
        return {"planner": 0.5 + 0.5 * (total == first + second), "worker": right / len(parts)}
