"""Writes a policy as a Hugging Face folder, or its adapter as one that peft reads."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.model.adapter_files import save_adapter
from proxima.model.parallel.sharded import plain_type
from proxima.model.pretrained import LoadedModel, untie_config
from proxima.system.atomic_files import ordinary_modes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_trained(loaded: LoadedModel, folder: Path) -> Path:
    """Write the trained weights and the tokenizer, and what makes pixels if prompts show images: the adapter alone if
    the model has one, else the model."""
    if loaded.images is not None:
        loaded.images.processor.save_pretrained(folder)
    if loaded.base is not None:
        return save_adapter(loaded, folder)
    return save(loaded.model, loaded.tokenizer, folder)


def save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: str | Path) -> Path:
    """Write `config.json`, safetensors and the tokenizer, so that `AutoModelForCausalLM.from_pretrained(folder)` gives
    the model back, bit for bit.

    Args:
        folder: created if missing. For an atomic write, the caller writes to a temporary name and renames.
    """
    dtype = model.config.dtype
    model.save_pretrained(folder)
    model.config.dtype = dtype  # save_pretrained leaves its name there
    save_settings(model, tokenizer, Path(folder))  # also over the config, which names our attention
    ordinary_modes(Path(folder))
    return Path(folder)


def save_settings(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: Path) -> None:
    """Write everything that `save` writes except the weights; the model may be sharded."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [plain_type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config._attn_implementation = None
    untie_config(model, config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
