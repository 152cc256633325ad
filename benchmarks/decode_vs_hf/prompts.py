"""Prompts that both sides continue: chats in the demo's format. Uses no proxima, so that either side can import it."""

import random
from typing import Any

SYSTEM = "Reply with only the number."


def prompts(tokenizer: Any, count: int, seed: int = 1) -> list[list[int]]:
    """Return `count` random questions as token ids, generation prompt included."""
    draw = random.Random(seed)
    questions = [f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}?" for _ in range(count)]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def without_end(model: Any, tokenizer: Any) -> None:
    """Disable the end tokens, so that both sides generate the same number of tokens; after it, no chat is rendered."""
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id = None
    tokenizer.chat_template = None
