"""Self-play: one policy plays both sides of Nim. From a heap of stones, each takes 1, 2 or 3 in turn; who takes the
last one wins, and who names another number loses at once.

proxima train examples/agents/nim.yaml        # in a checkout
"""

import re

from openai import AsyncOpenAI

PLAYERS = ("first", "second")
MOST = 3
RULES = (
    "You play a game. Two players take 1, 2 or 3 stones from a heap, one after the other. Who takes the last stone "
    "wins. Reply with only the number of stones that you take."
)


def stones_taken(text):
    """The first number in a message; 0 if it has none."""
    found = re.search(r"\d{1,9}", text or "")
    return int(found[0]) if found else 0


async def play(row, base_url, api_key, model):
    """One game: 1 for who wins, -1 for who loses. Each player has a conversation of its own, and hears of the other
    only how many stones are left."""
    stones = 4 + row["number"] % 9
    chats = {player: [{"role": "system", "content": RULES}] for player in PLAYERS}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        mover, other = PLAYERS
        while True:
            chat = chats[mover]
            chat.append({"role": "user", "content": f"The heap has {stones} stones."})
            answer = await client.chat.completions.create(model=f"{model}/{mover}", messages=chat)
            text = answer.choices[0].message.content
            chat.append({"role": "assistant", "content": text})
            taken = stones_taken(text)
            if not 1 <= taken <= min(MOST, stones):
                return {mover: -1.0, other: 1.0}
            stones -= taken
            if stones == 0:
                return {mover: 1.0, other: -1.0}
            mover, other = other, mover
