"""Prompts whose answers repeat much or little of what came before."""

import random

NAMES = ("Ada", "Bela", "Chen", "Dana", "Emil", "Fatou", "Goran", "Hana")
THINGS = ("apples", "tickets", "marbles", "notebooks", "eggs", "stamps", "shells", "cookies")
PLACES = ("library", "harbour", "bakery", "museum", "station", "garden", "school", "market")


def word_problem(draw: random.Random) -> list[dict[str, str]]:
    """A question like those of GSM8K; the answer restates some of its numbers and names."""
    name, thing, most = draw.choice(NAMES), draw.choice(THINGS), draw.randint(20, 90)
    question = (
        f"{name} buys {most} {thing} at the {draw.choice(PLACES)} for ${draw.randint(2, 9)} each. {name} gives "
        f"{draw.randint(2, 15)} {thing} to each of {draw.randint(2, 4)} friends and sells half of the rest for twice "
        f"the price. How much money does {name} make? Think step by step."
    )
    return [{"role": "user", "content": question}]


def edit(draw: random.Random) -> list[dict[str, str]]:
    """A text to be repeated word for word."""
    sentences = [
        f"On day {i + 1} {draw.choice(NAMES)} walked to the {draw.choice(PLACES)} and counted {draw.randint(10, 99)} "
        f"{draw.choice(THINGS)}."
        for i in range(8)
    ]
    return [
        {"role": "system", "content": "Repeat the user's text word for word."},
        {"role": "user", "content": " ".join(sentences[:2])},
        {"role": "assistant", "content": " ".join(sentences[:2])},
        {"role": "user", "content": " ".join(sentences)},
    ]


def tool_episode(draw: random.Random) -> list[dict[str, str]]:
    """A conversation whose turns call a tool and restate the request."""
    chat = [{"role": "system", "content": "Answer with one JSON call of a tool, and restate the request in it."}]
    for i in range(5):
        asked = f"How many {draw.choice(THINGS)} did {draw.choice(NAMES)} leave at the {draw.choice(PLACES)}?"
        call = f'{{"name": "search", "arguments": {{"request": "{asked}", "database": "inventory", "limit": 10}}}}'
        chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": call}][: 1 if i == 4 else 2]
    return chat


def story(draw: random.Random) -> list[dict[str, str]]:
    """Free text, in which little recurs except names."""
    about = f"{draw.choice(NAMES)}, who lost {draw.randint(2, 9)} {draw.choice(THINGS)} at the {draw.choice(PLACES)}"
    return [{"role": "user", "content": f"Write a long story about {about}."}]


TASKS = {"word problems": word_problem, "repeated text": edit, "tool calls": tool_episode, "stories": story}
