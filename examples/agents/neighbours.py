"""An agent of two roles: `up` names the number after one, and `down` the number before what `up` has named.

proxima train examples/agents/neighbours.yaml        # in a checkout
"""

import re

from openai import AsyncOpenAI

SYSTEM = {"role": "system", "content": "Reply with only the number."}


async def play(row, base_url, api_key, model):
    """One episode: each role gains by its own answer alone."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(player, question):
            messages = [SYSTEM, {"role": "user", "content": question}]
            answer = await client.chat.completions.create(model=f"{model}/{player}", messages=messages)
            numbers = re.findall(r"\d{1,9}", answer.choices[0].message.content)
            return int(numbers[-1]) if numbers else None

        number = int(re.findall(r"\d+", row["messages"][-1]["content"])[0])
        after = await ask("up", f"Which number comes after {number}?")
        given = number if after is None else after
        before = await ask("down", f"Which number comes before {given}?")
        return {"up": float(after == number + 1), "down": float(before == given - 1)}
