"""What replicas must have in common: with one another, and with the trainer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data import UserError
from proxima.engine.http.client import ServerClient, ServerError
from proxima.engine.http.dialect import Dialect, ServerFacts

#: letters, digits, spaces and symbols that tokenizers split differently
SAMPLE_TEXT = (
    "The 3 quick brown foxes don't jump 1,024 times:\n\n\t$x^2 \\neq 17$ naïve façade ÄÖÜ Ωμέγα 你好，世界 🦊 </s>"
)
ALIKE = ("server", "model", "dtype", "quantization", "log_probs")
NAMES = {"log_probs": "log-prob mode"}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a server is compared with, whenever it is asked what it can do.

    Args:
        facts: of the first replica.
        tokenizer: the trainer's.
    """

    facts: ServerFacts
    tokenizer: Any

    async def problem(self, dialect: Dialect, client: ServerClient, facts: ServerFacts) -> str | None:
        """How a server differs; None: not at all.

        Raises:
            ServerError: it can't be asked.
        """
        for name in ALIKE:
            ours, theirs = getattr(self.facts, name), getattr(facts, name)
            if ours != theirs:
                return f"its {NAMES.get(name, name)} is {theirs}, and that of the others is {ours}"
        if (facts.max_length or 0) < (self.facts.max_length or 0):
            return f"its longest sequence has {facts.max_length} tokens, and that of the others {self.facts.max_length}"
        if not facts.token_ids:
            return "its completions do not come as token ids"
        ids = await dialect.tokenize(client, facts, SAMPLE_TEXT)
        return None if ids is None else token_problem(ids, encoded(self.tokenizer, SAMPLE_TEXT))


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, no special tokens added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_problem(theirs: Sequence[int], ours: Sequence[int]) -> str | None:
    """How the ids of a text by another tokenizer differ; None: they are the same."""
    if list(theirs) == list(ours):
        return None
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return (
        f"it has another tokenizer: token {at} of a text is {list(theirs[at : at + 1])}, not {list(ours[at : at + 1])}"
    )


async def ask_all(dialect: Dialect, clients: Sequence[ServerClient]) -> list[ServerFacts | Exception]:
    """What each server can do, or why it does not say so."""

    async def ask(client: ServerClient) -> ServerFacts | Exception:
        try:
            return await dialect.probe(client)
        except (ServerError, UserError) as error:
            return error

    return await asyncio.gather(*(ask(client) for client in clients))
