"""An agent of two roles: a proposer writes a sum, and the solver tries it several times. One policy plays both.

proxima train examples/agents/sums.yaml        # in a checkout
"""

import re

from openai import AsyncOpenAI

ATTEMPTS = 4
SUM = re.compile(r"\s*(\d{1,2}) ?\+ ?(\d{1,2})\s*=?\s*\??\s*")
PROPOSE = "Write one sum of two numbers that begins with {first}, such as {first} + 7. No words, no result."


async def play(row, base_url, api_key, model):
    """One episode: the proposer gains where some attempts are right and others wrong, an attempt where it is right."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def say(player, *messages):
            chat = [{"role": role, "content": text} for role, text in messages]
            answer = await client.chat.completions.create(model=f"{model}/{player}", messages=chat)
            return answer.choices[0].message.content

        first = re.findall(r"\d+", row["messages"][-1]["content"])[0]
        proposal = SUM.fullmatch(await say("proposer", ("user", PROPOSE.format(first=first))))
        if proposal is None:  # nothing to solve
            return {"proposer": -1.0}
        a, b = map(int, proposal.groups())
        right = []
        for attempt in range(ATTEMPTS):  # one after the other, so that a resumed run draws the same
            question = ("system", "Reply with only the number."), ("user", f"What is {a} + {b}?")
            answer = await say(f"solver/{attempt}", *question)
            right.append(float(re.findall(r"\d+", answer)[-1:] == [str(a + b)]))
        solved = sum(right) / ATTEMPTS
        return {"proposer": 4 * solved * (1 - solved), **{f"solver/{i}": reward for i, reward in enumerate(right)}}
