"""Checks the JSON files of a model folder before anything else reads them: types and sizes of what they say.

transformers and proxima take many values as they are: a text as an end-of-text token fails at the first sample, and a
billion layers end the machine. A value that no model has is refused here, in one line with file and key; values that
are not listed are left to transformers, whose errors are reported likewise.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from proxima.data import FieldError
from proxima.data.json_reader import load_json

LARGEST_FILE = 1 << 26  # bytes, of JSON beside the vocabulary
REMEDY = "repair the file, or download the folder again"


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _size(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    return f"must be a whole number in [{least}, {most:,}]", lambda value: _whole(value, least, most)


def _sizes(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    """Of some families one number, of others one for each layer."""
    said = f"must be a whole number in [{least}, {most:,}], or a list of them"
    return said, lambda value: all(_whole(x, least, most) for x in (value if isinstance(value, list) else [value]))


def _of(said: str, *types: type) -> tuple[str, Callable[[Any], bool]]:
    return f"must be {said}", lambda value: isinstance(value, types)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    named = value if isinstance(value, list) else [value] if isinstance(value, dict) and "template" in value else []
    if isinstance(value, dict) and not named:
        return all(isinstance(text, str) for text in value.values())
    parts = [part.get(key) if isinstance(part, dict) else None for part in named for key in ("name", "template")]
    return isinstance(value, str) or (bool(named) and all(isinstance(part, str) for part in parts))


ID = _size(-1, 2**31 - 1)
LIST_OF_IDS = "must be a token id, or a list of them"
TEXTS = "must be a list of texts"
IDS = (LIST_OF_IDS, _sizes(-1, 2**31 - 1)[1])
Rules = tuple[tuple[str, tuple[str, Callable[[Any], bool]]], ...]

# names of keys → what their values must be; null is allowed everywhere, and of several rules the first counts
CONFIG: Rules = (
    (r"eos_token_id", IDS),
    (r"(bos|pad|unk|sep|cls|mask|decoder_start)_token_id", ID),
    (r"architectures", (TEXTS, lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))),
    (r"model_type", _of("a text", str)),
    (r"(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers)", _size(1, 10_000)),
    (r"(hidden_size|n_embd|d_model)", _size(1, 1 << 24)),
    (r"vocab_size", _size(1, 1 << 28)),
    (r"(num_attention_heads|n_head|num_heads)", _sizes(1, 1 << 16)),
    (r"(num_key_value_heads|head_dim)", _sizes(1, 1 << 16)),
    (r"(intermediate_size|n_inner|ffn_dim)", _sizes(1, 1 << 28)),
    (r"(max_position_embeddings|n_positions)", _size(1, 1 << 40)),
    (r"(num_experts|num_local_experts|n_routed_experts|num_experts_per_tok)", _sizes(0, 1 << 16)),
    (r"num_labels", _size(1, 1 << 20)),
    (r"tie_word_embeddings", _of("true or false", bool)),
    (r"(rope_scaling|rope_parameters|quantization_config|text_config|vision_config)", _of("an object", dict)),
    (r"layer_types|mlp_layer_types", _of("a list", list)),
    (r"(torch_)?dtype", _of("a text", str)),
)
GENERATION: Rules = (
    *CONFIG[:2],
    (r"(suppress|begin_suppress)_tokens|forced_(bos|eos)_token_id", IDS),
    (r"(temperature|top_p|top_k|min_p|repetition_penalty|max_(new_)?(length|tokens))", _of("a number", int, float)),
)
TOKENIZER: Rules = (
    (
        r"model_max_length",
        ("must be a number > 0", lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x > 0),
    ),
    (r"chat_template", ("must be a text, or a list of objects with name and template", _is_template)),
    (r"(bos|eos|unk|sep|pad|cls|mask)_token", ("must be a text, or an object with content", _is_token)),
    (r"(additional|extra)_special_tokens", _of("a list or an object", list, dict)),
    (r"added_tokens_decoder", _of("an object", dict)),
    (r"tokenizer_class", _of("a text", str)),
)
FILES: Mapping[str, Rules] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
    "special_tokens_map.json": TOKENIZER,
}


def check_model_files(path: str, folder: Path) -> None:
    """Refuse the model `path` if a file of its folder has a value that no model has.

    Raises:
        FieldError: names the file, the key and its value.
    """
    for name, rules in FILES.items():
        file = folder / name
        if file.is_file():
            facts = file.stat()
            if problem := _problem(file, rules, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)):
                raise FieldError("model.path", path, problem, remedy=REMEDY)
    template = folder / "chat_template.jinja"
    if template.is_file() and (problem := _unreadable(template)):
        raise FieldError("model.path", path, problem, remedy=REMEDY)


def _unreadable(template: Path) -> str | None:
    if template.stat().st_size > LARGEST_FILE:
        return f"has a {template.name} of more than {LARGEST_FILE:,} bytes"
    try:
        template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"has a {template.name} that can't be read: {error}"
    return None


@lru_cache(maxsize=64)
def _problem(file: Path, rules: Rules, facts: tuple[int, int, int]) -> str | None:
    """What is wrong with a file of these facts; None if nothing is."""
    if facts[0] > LARGEST_FILE:
        return f"has a {file.name} of more than {LARGEST_FILE:,} bytes"
    try:
        values = load_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"has a {file.name} that can't be read: {error}"
    if not isinstance(values, dict):
        return f"has a {file.name} that is not a JSON object"
    return next((f"has {file.name} with {problem}" for problem in _wrong(values, rules)), None)


def _wrong(values: Mapping[str, Any], rules: Rules, above: str = "") -> Iterator[str]:
    for key, value in values.items():
        rule = next((rule for name, rule in rules if re.fullmatch(name, key)), None)
        if value is not None and rule is not None and not rule[1](value):
            yield f"{above}{key}={_shown(value)}, which {rule[0]}"
        elif isinstance(value, dict) and key.endswith("_config"):  # the part about text, images or sound
            yield from _wrong(value, rules, f"{above}{key}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
