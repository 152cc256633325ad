"""Writes a policy as a Hugging Face folder, or its adapter as one that peft reads."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from proxima.model.parallel.sharded import plain_type
from proxima.model.pretrained import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_trained(loaded: LoadedModel, folder: Path) -> Path:
    """Write the trained weights and the tokenizer: the adapter alone if the model has one, else the model."""
    if loaded.base is not None:
        from proxima.model.adapter_files import save_adapter

        return save_adapter(loaded.model, loaded.tokenizer, loaded.base, folder)
    return save(loaded.model, loaded.tokenizer, folder)


def save(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `config.json`, safetensors and the tokenizer, so that `AutoModelForCausalLM.from_pretrained(folder)` gives
    the model back.

    Args:
        folder: created if missing. For an atomic write, the caller writes to a temporary name and renames.
        dtype: dtype of the written weights; None writes them unchanged (bit-equal after loading).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = None
    if dtype is not None:
        weights = model.state_dict().items()
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights}
    written = model.config.dtype
    attention = model.config._attn_implementation
    try:
        model.config.dtype = dtype or model.dtype
        model.config._attn_implementation = None
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.dtype = written
        model.config._attn_implementation = attention
    if dtype is not None:  # Hugging Face writes the dtype of the running model
        file = folder / "config.json"
        values = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_settings(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: Path) -> None:
    """Write everything that `save` writes except the weights; the model may be sharded."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [plain_type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config._attn_implementation = None
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
