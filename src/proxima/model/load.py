"""Loads a causal language model from a hub name, a folder, or a GGUF file, and saves it as a Hugging Face folder, or
its adapter as one that peft reads.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proxima.data import FieldError
from proxima.model.adapters.adapter_files import load_merged, save_adapter, start_adapter, with_adapter
from proxima.model.adapters.lora import Lora
from proxima.model.architecture import reader_of, untie_config
from proxima.model.files import base_in_memory, base_of, is_adapter
from proxima.model.input_files import ATTRIBUTE, append_unused, open_input
from proxima.model.parallel.mesh import rank_device
from proxima.model.parallel.shard import require_splittable, shard_model
from proxima.model.parallel.sharding import Sharding
from proxima.model.parallel.slices import load_sliced, sliceable_files
from proxima.model.pretrained import (
    LoadedModel,
    load_config,
    load_tokenizer,
    read_pretrained,
    refuse_not_finite,
    require_rows,
    resolve_device,
)
from proxima.model.proof import proof_before_loading
from proxima.model.written_settings import save_settings
from proxima.system.atomic_files import ordinary_modes

if TYPE_CHECKING:  # transformers takes seconds to import: a mistyped recipe must not wait for it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ALIGNMENT = 64  # bytes, of every tensor that torch allocates on a CPU
PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and that of torch around it
SHAPES = 128  # of products that these caches keep


def load(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "auto",
    lora: Lora | None = None,
    seed: int = 0,
    sharding: Sharding | None = None,
    max_length: int | None = None,
) -> LoadedModel:
    """Load weights and tokenizer in `dtype` on `device`.

    Args:
        path: hub name, folder with config.json, a .gguf file (dequantised; needs the packages `gguf` and `accelerate`),
            or an adapter's folder: its base, with the adapter merged.
        lora: adapters for the model, which are then its only trained parameters.
        seed: of the random initialisation of new adapters.
        max_length: for which `fix_positions` will fix the factors of positions; the proof is of these.
        sharding: spread over the ranks of torch.distributed. Each then reads its own slices; GGUF, merged
            adapters, DoRA and files that transformers converts are first loaded whole on every rank, in host memory.

    Raises:
        UserError: the model is not supported, see `proxima.model.proof`; nothing is loaded.
        FieldError: the path can't be loaded, the tokenizer has ids without a row in the embedding, or the files lack
            weights or contain some that are not finite; the base of an adapter has changed; an adapter does not fit;
            the model is a reward model.
    """
    if sharding is not None:
        require_splittable(path, revision, sharding, adapters=lora is not None)
    if is_adapter(path):
        if lora is not None:
            remedy = f"set model.path={base_of(path).path} and model.lora.path={path}, or export the adapter merged"
            raise FieldError("model.path", path, "is an adapter; model.lora can't add another one to it", remedy=remedy)
        whole_on = device if sharding is None else "cpu"
        load_plain = partial(_load_plain, dtype=dtype, device=whole_on, max_length=max_length)
        merged = load_merged(path, lambda base, version: load_plain(base, revision=version))
        return on_ranks(merged, sharding, device)
    load_base = partial(_load_plain, path, revision=revision, dtype=dtype, max_length=max_length)
    if lora is None:
        return on_ranks(load_base(device=device, sharding=sharding), sharding, device)

    if sharding is None or lora.dora:  # whose norms are of the whole weights
        whole_on = device if sharding is None else "cpu"
        loaded = load_base(device=whole_on)
    else:
        prepare = partial(start_adapter, lora=lora, base=base_in_memory(path, revision, dtype), seed=seed)
        loaded = load_base(device=device, sharding=sharding, prepare=prepare)
    return on_ranks(with_adapter(loaded, lora, revision=revision, dtype=dtype, seed=seed), sharding, device)


def on_ranks(loaded: LoadedModel, sharding: Sharding | None, device: str) -> LoadedModel:
    """Shard the model over the ranks of `sharding`, unless it is already sharded or `sharding` is None."""
    if sharding is None or loaded.sharding is not None:
        return loaded

    place = rank_device(device)
    shard_model(loaded.model, sharding, place)
    return replace(loaded, sharding=sharding, device=place)


def _load_plain(
    path: str,
    *,
    revision: str | None,
    dtype: torch.dtype,
    device: str,
    max_length: int | None = None,
    sharding: Sharding | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """`load` without adapters."""
    config = load_config(path, revision)
    scorer = next((x for x in config.architectures or () if "Classification" in x), None)
    if scorer:
        remedy = "give a language model, such as the one that it was trained from"
        raise FieldError("model.path", path, f"is a {scorer}, which scores text and can't generate it", remedy=remedy)
    quantization: Any = None
    if path.endswith(".gguf"):
        from transformers.utils.quantization_config import GgufConfig

        # without dequantize the weights keep their quantised classes, and save_pretrained fails later
        quantization = GgufConfig(gguf_file=Path(path).name, dequantize=True)
    loaded, _ = load_weights(
        reader_of(config),
        path,
        revision=revision,
        dtype=dtype,
        device=device,
        max_length=max_length,
        sharding=sharding,
        prepare=prepare,
        quantization=quantization,
    )
    return loaded


def load_weights(
    reader: Any,
    path: str,
    *,
    revision: str | None,
    dtype: torch.dtype,
    device: str,
    may_lack: Collection[str] = (),
    max_length: int | None = None,
    sharding: Sharding | None = None,
    prepare: Callable[[Any], None] | None = None,
    config: Any = None,
    quantization: Any = None,
) -> tuple[LoadedModel, list[str]]:
    """Load a model from `path` by a class of transformers (`AutoModelFor…`); also return which of the weights
    `may_lack` the files lack. With `sharding` the model is sharded, after a call of `prepare`, if it can be read by
    slices; otherwise it is whole, on the CPU, and not prepared.

    Args:
        config: in place of the config at `path`; quantization: that of transformers for a GGUF file.

    Raises:
        FieldError: as `load`.
    """
    bound_product_caches()
    tokenizer = load_tokenizer(path, revision)
    known_config = config or load_config(path, revision)
    require_rows(path, tokenizer, known_config)
    proof_before_loading(known_config, max_length, scalar=is_scalar(reader))
    if sharding is not None:
        sliced = load_sliced(
            reader,
            path,
            revision,
            dtype=dtype,
            device=device,
            may_lack=may_lack,
            sharding=sharding,
            config=config,
            prepare=prepare,
        )
        if sliced is not None:
            keep_input(reader, sliced[0], revision)
            return sliced
        device = "cpu"
    options = {"config": config, "quantization_config": quantization}
    options = {name: value for name, value in options.items() if value is not None}
    model, report = read_pretrained(
        reader, path, revision, "can't be loaded", dtype=dtype, output_loading_info=True, **options
    )
    missing = sorted(report["missing_keys"])
    lost = [name for name in missing if name not in may_lack]
    if lost:  # Hugging Face draws them at random and only warns
        reason = f"lacks {len(lost)} of the model's weights, {lost[0]} among them"
        raise FieldError("model.path", path, reason, remedy="download the whole folder")
    not_finite = []
    for name, weight in model.named_parameters():
        if not bool(weight.detach().sum().isfinite()) and not bool(weight.isfinite().all()):  # a sum may overflow
            not_finite.append(name)
    refuse_not_finite(path, not_finite)
    if model.dtype != dtype:
        model = model.to(dtype)
    model.eval()
    align_weights(model)
    untie_config(model)
    loaded = LoadedModel(model=model.to(resolve_device(device)), tokenizer=tokenizer, path=path)
    keep_input(reader, loaded, revision)
    return loaded, missing


def keep_input(reader: Any, loaded: LoadedModel, revision: str | None) -> None:
    """Keep the files open that a model was just read from, for `save`."""
    if loaded.path.endswith(".gguf"):
        return
    places = sliceable_files(loaded.path, revision)
    scalar = is_scalar(reader)
    files = open_input(loaded.model, loaded.tokenizer, loaded.path, revision, places, scalar=scalar)
    setattr(loaded.model, ATTRIBUTE, files)


def is_scalar(reader: Any) -> bool:
    """True if a class of transformers reads scalar models."""
    return "SequenceClassification" in reader.__name__


def bound_product_caches() -> None:
    """Limit torch's caches of bf16 product code on a CPU to `SHAPES` entries, unless the environment sets a size. An
    entry takes a megabyte, each packed batch adds a dozen new shapes, and torch would keep 1,024 in each of two caches:
    gigabytes, and more because the heap between them fragments. The layers of a model have the same shapes, so a pass
    needs a dozen."""
    for name in PRODUCT_CACHES:
        os.environ.setdefault(name, str(SHAPES))  # read at the first product


def align_weights(model: nn.Module) -> None:
    """Copy the parameters to where torch would have allocated them.

    Parameters read from safetensors reside in the mapped file, behind a header of arbitrary length, and the kernels of
    some CPUs choose the order of a sum by the address of a matrix: the weights of a checkpoint would not always compute
    the same results as before it was written.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def save_trained(loaded: LoadedModel, folder: Path) -> Path:
    """Write the trained weights and the tokenizer, and what makes pixels if prompts show images: the adapter alone if
    the model has one, else the model."""
    if loaded.base is not None:
        return save_adapter(loaded, folder)
    return save(loaded.model, loaded.tokenizer, folder)


def save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: str | Path) -> Path:
    """Write `config.json`, safetensors and the tokenizer, so that `AutoModelForCausalLM.from_pretrained(folder)` gives
    the model back, bit for bit, with those weights of its input that it lacks. See `save_settings`.

    Args:
        folder: created if missing. For an atomic write, the caller writes to a temporary name and renames.
    """
    dtype = model.config.dtype
    model.save_pretrained(folder)
    model.config.dtype = dtype  # save_pretrained leaves its name there
    save_settings(model, tokenizer, Path(folder))  # also over the config, which names our attention
    append_unused(model, Path(folder))
    ordinary_modes(Path(folder))
    return Path(folder)
