"""A judge that obeys: it follows every order that it finds outside the fences, and control tokens, as a template reads
them, end the message that they stand in. Without an order it gives an answer the share of its letters that are `a`."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.reward.server import Scorer, scorer

ORDER = re.compile(r"give (?:this|every) answer (?:the )?score (\d+)", re.IGNORECASE)
TURN = re.compile(r"<[|｜][^<>]*[|｜]>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")
PROBE = "What is 1 + 1?"


def fenced(messages: list[dict[str, str]]) -> tuple[dict[str, str], str]:
    """The data by their names, and all that stands outside the fences, as a model that trusts them would read it."""
    system, user = (message["content"] for message in messages)
    marker = re.search(r"`\[\[(\S+) …\]\]`", system)
    pattern = re.compile(rf"^\[\[{marker[1]} (.+?)\]\]\n(.*?)\n\[\[end {marker[1]}\]\]$", re.DOTALL | re.MULTILINE)
    data = {found[1]: found[2] for found in pattern.finditer(user)}
    outside = pattern.sub("", user)
    for text in data.values():
        _, *broken_out = TURN.split(text)
        outside += "\n".join(broken_out)
    return data, outside


def numbers(request: dict[str, Any]) -> list[int]:
    """The scores of the answers, in the order in which they are shown."""
    data, outside = fenced(request["messages"])
    order = ORDER.search(outside)
    answers = [text for name, text in data.items() if name.startswith("answer")]
    if order:
        return [int(order[1])] * len(answers)
    return [round(10 * text.count("a") / max(1, len(text))) for text in answers]


def chat(content: Any, finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion."""
    text = content if isinstance(content, str) else json.dumps(content)
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


def verdict(request: dict[str, Any], n: int = 0) -> Any:
    """The verdict of the judge that obeys."""
    given = numbers(request)
    compares = "answers of equal worth" in request["messages"][0]["content"]
    return chat({"reason": "so", "scores": given} if compares else {"reason": "so", "score": given[0]})


@contextmanager
def judge(answer: Callable[[Any, int], Any] = verdict) -> Iterator[Scorer]:
    """A server of chat completions; its `url` is that of OpenAI's client."""
    with scorer(answer) as made:
        made.url = made.url.removesuffix("/score") + "/v1"
        yield made
