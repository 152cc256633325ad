"""An agent of two roles: a proposer completes a sum, and the solver tries it several times. One policy plays both.

proxima train examples/agents/sums.yaml        # in a checkout
"""

import re

from openai import AsyncOpenAI

ATTEMPTS = 4
SYSTEM = {"role": "system", "content": "Reply with only the number."}


def last_number(text):
    return int((re.findall(r"\d{1,9}", text) or ["0"])[-1])


async def play(row, base_url, api_key, model):
    """One episode: the proposer gains where some attempts are right and others wrong, an attempt where it is right."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(player, question):
            messages = [SYSTEM, {"role": "user", "content": question}]
            answer = await client.chat.completions.create(model=f"{model}/{player}", messages=messages)
            return last_number(answer.choices[0].message.content)

        first = int(re.findall(r"\d+", row["messages"][-1]["content"])[0])
        second = await ask("proposer", f"Choose a number from 1 to 99 to add to {first}.")
        if not 1 <= second <= 99:  # nothing to solve
            return {"proposer": -1.0}
        right = {}
        for attempt in range(ATTEMPTS):  # one after the other, so that a resumed run draws the same
            player = f"solver/{attempt}"
            right[player] = float(await ask(player, f"What is {first} + {second}?") == first + second)
        solved = sum(right.values()) / ATTEMPTS
        return {"proposer": 4 * solved * (1 - solved), **right}
