"""The sizes of a model, by which a server of another model with the same tokenizer is known before weights are sent."""

from collections.abc import Mapping
from typing import Any

from proxima.engine.http.answer_values import one_line

#: names in a config of transformers, and what they count; settings that change no weight are left out
SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden units",
    "intermediate_size": "units in an MLP",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "head_dim": "units in a head",
    "vocab_size": "vocabulary rows",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "moe_intermediate_size": "units in an expert",
}
FAMILY = "model_type"


def sizes_of(config: Any) -> dict[str, int | str]:
    """The family and the sizes in a config of transformers; sizes that it lacks are left out. None: no sizes."""
    if config is None:
        return {}
    text = config.get_text_config()
    return named_sizes({FAMILY: config.model_type} | {name: getattr(text, name, None) for name in SIZES})


def named_sizes(values: Any) -> dict[str, int | str]:
    """The family and the sizes among what a server, which may be of any kind, has answered."""
    if not isinstance(values, Mapping):
        return {}
    sizes: dict[str, int | str] = {}
    family = values.get(FAMILY)
    if isinstance(family, str) and family:
        sizes[FAMILY] = one_line(family, 40)
    return sizes | {name: values[name] for name in SIZES if type(values.get(name)) is int}


def sizes_of_folder(path: str) -> dict[str, int | str]:
    """The sizes of a model that is on this machine, as a folder or in the cache of the hub; else none."""
    from transformers import AutoConfig

    try:
        return sizes_of(AutoConfig.from_pretrained(path, local_files_only=True))
    except Exception:  # it is somewhere else, or not readable: the server alone knows
        return {}


def different_sizes(theirs: Mapping[str, int | str], ours: Mapping[str, int | str]) -> tuple[str, str] | None:
    """The sizes in which two models differ, of each in words: `24 layers, 1,024 hidden units`; None: in none that is
    known of both."""
    names = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    if not names:
        return None
    return in_words({name: theirs[name] for name in names}), in_words({name: ours[name] for name in names})


def in_words(sizes: Mapping[str, int | str]) -> str:
    """`24 layers, 1,024 hidden units`; empty without sizes."""
    counted = [_counted(name, size) for name, size in sizes.items()]
    return ", ".join(dict.fromkeys(counted))  # some families have a size under two names


def _counted(name: str, size: int | str) -> str:
    if isinstance(size, int):
        return f"{size:,} {SIZES[name]}"
    return f"the family {size}"
