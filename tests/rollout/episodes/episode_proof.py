"""Plays random episodes through a `Conversation` and compares it with what it should be, told by other means.

The oracle renders the whole chat as text, with `apply_chat_template`, and knows nothing of stand-ins, nodes or token
ids: a fork is where that text does not begin with the text that the model saw."""

import random
from dataclasses import dataclass, field

import numpy as np

from proxima.rollout.episodes.conversation import Conversation, ForkRefused, TurnTemplate
from tests.rollout.episodes.chat_families import Family

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"name": "search", "description": "Looks up <|im_start|>, [INST] and </s>.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": SEARCH}]
WORDS = (
    *("Right", " it is", "\n", "\n\n", " ", "  ", "\t", "12", " the dog", ".", "é", "東京", "🙂", "\ufffd", "\u2028"),
    *("\U000f0001", "\U000f0000\U00100001", "<think>", "\n</think>\n\n", "</think>", "<tool_call>", "</tool_call>"),
    *(
        "user",
        "assistant",
        '{"name": "search", "arguments": {}}',
        "<assistant>\n",
        "\n</assistant>\n",
        "\x00",
        "a\u0301",
    ),
)
LITERAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "[INST]", "[/INST]", "<|endoftext|>", "<|im_", "start|>")


@dataclass
class Played:
    """What happened in an episode, recorded beside the conversation: the requests of an engine and the oracle's."""

    contexts: list[list[int]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # the text of each context, by the oracle
    forks: int = 0
    forks_seen: int = 0  # of those, the ones that a turn followed
    plain: bool = False  # every turn is encoded as the tokenizer does, and no control text is a content


def text_of(draw: random.Random, literal: bool, longest: int = 8) -> str:
    words = (*WORDS, *LITERAL) if literal else WORDS
    return "".join(draw.choice(words) for _ in range(draw.randrange(longest)))


def turn_of(draw: random.Random, family: Family, tokenizer, played: Played) -> list[int]:
    """Tokens as a model might sample them: of a text, or of its pieces, or any; whole or cut anywhere."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    kind = 0.0 if played.plain else draw.random()
    text = draw.choice(("", " ", "<think>\nHm.\n</think>\n\n", "<think>\n")) + text_of(draw, literal=kind > 0.9)
    if kind < 0.4:
        tokens = encode(text)
    elif kind < 0.8:
        places = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
        tokens = [token for piece in pieces for token in encode(piece)]
    else:
        tokens = encode(text) + [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(6))]
    if played.plain:
        # A line end at the beginning would join that of the generation prompt if both were encoded together.
        text = text.strip() or "x"
        return [*encode(f" {text}" if family.name.startswith("mistral") else text), *encode(family.eos)]
    match draw.randrange(6):
        case 0:  # cut in the middle, also of a character
            tokens = tokens[: draw.randrange(len(tokens) + 1)]
        case 1:  # another control token
            tokens = [*tokens, *encode(draw.choice(family.control))]
        case 2 if draw.random() < 0.3:
            tokens = []
        case _:
            tokens = [*tokens, *encode(family.eos)]
    return tokens


def render(tokenizer, messages, tools) -> str:
    if tokenizer.chat_template is None:
        return "".join(message["content"] + "\n" for message in messages)
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


def content_of(tokenizer, tokens: list[int], end: str) -> str:
    """The text of a turn, without the control token that its template writes at the end of one."""
    ends = bool(end) and bool(tokens) and tokens[-1] == tokenizer.convert_tokens_to_ids(end)
    return tokenizer.decode(tokens[: len(tokens) - ends])


def play(seed: int, family: Family, tokenizer, forks: str = "train") -> None:
    """One episode; AssertionError where something differs."""
    draw, played = random.Random(f"{family.name}{seed}"), Played()
    tools = TOOLS if draw.random() < 0.5 and family.template else None
    literal = draw.random() < 0.3
    played.plain = not literal and tools is None and draw.random() < 0.3
    history = [{"role": "user", "content": text_of(draw, literal) or "Hi"}]
    if draw.random() < 0.5:
        history.insert(0, {"role": "system", "content": "Be brief. " + text_of(draw, literal)})
    template = TurnTemplate(tokenizer, {}, tools)
    conversation = Conversation(template, history, forks)
    seen = render(tokenizer, history, tools)
    prompt = encoded(tokenizer, seen)
    assert not played.plain or conversation.prompt.tolist() == prompt
    played.plain &= encoded(tokenizer, f"{seen}x")[: len(prompt)] == prompt  # or the turn joins the generation prompt
    pending = 0
    for _ in range(draw.randint(1, 6)):
        context = conversation.context.tolist()
        tokens = turn_of(draw, family, tokenizer, played)
        played.contexts.append(context)
        played.turns.append(tokens)
        played.seen.append(seen)
        played.forks_seen += pending
        pending = 0
        conversation.add_turn(np.array(tokens, np.int32), "", "stop")
        if draw.random() < 0.2:
            break
        role = draw.choice(("tool", "user")) if family.template else "user"
        answers = [{"role": role, "content": text_of(draw, literal)} for _ in range(draw.choice((1, 1, 2)))]
        history = [*history, {"role": "assistant", "content": content_of(tokenizer, tokens, family.end)}, *answers]
        seen += tokenizer.decode(tokens)
        whole = render(tokenizer, history, tools)
        forked = not whole.startswith(seen)
        if forked and forks == "refuse":
            try:
                conversation.observe(answers)
            except ForkRefused:
                break
            raise AssertionError("a fork was not refused")
        assert conversation.observe(answers) == forked, (family.name, seed, whole[-200:], seen[-200:])
        played.forks += forked
        pending = int(forked)
        seen = whole
        assert "\ufffd" in tokenizer.decode(conversation.context) or tokenizer.decode(conversation.context) == whole
        if played.plain and family.end:
            assert played.forks or conversation.context.tolist() == encoded(tokenizer, whole), (family.name, seed)
        if not played.forks:
            assert control_tokens(conversation, played, tokenizer) == written(tokenizer, history, tools, played, family)
    compare(conversation, played)


def encoded(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def control_tokens(conversation: Conversation, played: Played, tokenizer) -> int:
    """How many there are in the context beside those that were sampled."""
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    sampled = sum(token in special for turn in played.turns for token in turn)
    return sum(token in special for token in conversation.context.tolist()) - sampled


def written(tokenizer, history, tools, played: Played, family: Family) -> int:
    """How many the template writes around contents without any, less those that the model sampled in their place."""
    neutral = [message | {"content": "x"} for message in history]
    about = {"function": {"name": "x", "description": "x", "parameters": {}}}
    text = render(tokenizer, neutral, tools and [about])
    end = tokenizer.convert_tokens_to_ids(family.end) if family.end else None
    ended = sum(turn[-1:] == [end] for turn in played.turns)
    return sum(text.count(control) for control in family.control) - ended


def compare(conversation: Conversation, played: Played) -> None:
    """Each token that was sampled is trained in one place, and there the model saw what the engine was asked with."""
    paths = conversation.paths()
    assert len(paths) == 1 + played.forks_seen
    trained = [int(token) for path in paths for token in path.tokens[path.sampled]]
    assert trained == [token for turn in played.turns for token in turn]
    turns = []
    for path in paths:
        assert len(path.tokens) == len(path.sampled) == sum(span.tokens for span in path.spans)
        opening = conversation.prompt if path.initial_prompt is None else path.initial_prompt
        whole, start = [*opening.tolist(), *path.tokens.tolist()], len(opening)
        for span in path.spans:
            stop = start + span.tokens
            if span.sampled:
                assert span.role == "assistant"
                assert whole[:start] == played.contexts[span.turn]
                assert whole[start:stop] == played.turns[span.turn]
                turns.append(span.turn)
            mask = path.sampled[start - len(opening) : stop - len(opening)]
            assert mask.tolist() == [span.sampled] * span.tokens
            start = stop
    assert turns == list(range(len(played.turns)))
