"""JSON values as a program that nobody here has written may send them."""

import random
from typing import Any

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    float("nan"),
    "",
    "\ud800",
    "a" * 5000,
    [],
    [None],
    [[]],
    {},
    {"a": 1},
    [{"name": 3}],
]


def damaged(draw: random.Random, value: Any) -> Any:
    """A JSON value in which one part is another one."""
    if draw.random() < 0.35 or not isinstance(value, dict | list) or not value:
        return draw.choice(ODD)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [damaged(draw, each) if number == place else each for number, each in enumerate(value)]
    name = draw.choice(list(value))
    if draw.random() < 0.2:
        return {key: each for key, each in value.items() if key != name}
    return value | {name: damaged(draw, value[name])}
