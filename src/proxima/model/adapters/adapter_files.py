"""Adapters on disk: folders that peft reads, with the identity of the model that they were made for.

adapter_config.json         peft's own: base model, rank, targets …
adapter_model.safetensors   the trained matrices, float32, under peft's names, and the head of a scalar model
base.json                   written by proxima: dtype and SHA-256 of the base's weights
config.json                 of a scalar model, whose config the base does not have
tokenizer files
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from proxima.data import FieldError, require
from proxima.model.adapters.lora import Lora, attach, merge_adapter, trained_names
from proxima.model.architecture import ADAPTER, SCALAR_HEAD
from proxima.model.files import ADAPTER_CONFIG as CONFIG
from proxima.model.files import (
    BASE,
    BaseModel,
    base_in_memory,
    base_of,
    is_adapter,
    read_json,
    refuse_partial_weights,
    refuse_pointers,
    weight_files,
)
from proxima.model.input_files import input_files_of
from proxima.model.pretrained import LoadedModel, check_path, load_config, load_tokenizer, require_rows
from proxima.model.written_settings import write_config, write_tokenizer
from proxima.system.atomic_files import ordinary_modes

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's own, before the name in the Hugging Face model
# fields of peft's config that do not affect the matrices or are read separately; all others must have peft's default
FREE = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version"),
    *("revision", "task_type", "lora_alpha", "r", "target_modules", "use_dora", "use_rslora", "runtime_config"),
    *("exclude_modules", "fan_in_fan_out", "megatron_core", "modules_to_save", "qalora_group_size"),
}
# fields that every version of peft knows, and some servers ask for
OLDEST = {
    *("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha"),
    *("lora_dropout", "modules_to_save", "peft_type", "r", "revision", "target_modules", "task_type"),
}
KEPT_BASE = (True, False, "gaussian", "orthogonal", "eva")  # initialisations that leave the base's weights unchanged


def check_base(path: str, base: BaseModel, *, field_name: str) -> None:
    """Refuse an adapter whose base is not the one that it was made for.

    Args:
        path: the adapter's folder.
        base: the model that is to get the adapter; its `files` may be empty if they are unknown.
        field_name: the field that holds the adapter's path, for the error.

    Raises:
        FieldError: names what differs, and the remedy.
    """
    wanted = base_of(path)
    if wanted.files and base.files:
        changed = [name for name in {**wanted.files, **base.files} if wanted.files.get(name) != base.files.get(name)]
        if changed:
            reason = f"was made for a different base than {base.path}: {changed[0]} differs"
            remedy = f"restore that file of {wanted.path}, or use an adapter made for this model"
            raise FieldError(field_name, path, reason, remedy=remedy)
    elif not _same_model(wanted.path, base.path):
        reason = f"was made for {wanted.path}, and the model is {base.path}"
        remedy = f"set model.path={wanted.path}; if both are one model, write its path into {CONFIG}"
        raise FieldError(field_name, path, reason, remedy=remedy)


def _same_model(first: str, second: str) -> bool:
    places = [Path(name).expanduser() for name in (first, second)]
    if all(place.exists() for place in places):
        return places[0].samefile(places[1])
    return places[0].name.lower() == places[1].name.lower()


def read_settings(path: str, *, field_name: str, scalar: bool = False) -> Lora:
    """The settings of an adapter.

    Args:
        scalar: require an adapter of a scalar model, with the head.

    Raises:
        FieldError: it is not a LoRA adapter, or it uses a feature that proxima does not support.
    """
    from peft import LoraConfig

    refuse_pointers(path, Path(path).expanduser(), field_name)
    refuse_partial_weights(path, Path(path).expanduser(), field_name)
    settings = read_json(path, Path(path).expanduser() / CONFIG, field_name)
    remedy = "merge it with peft's merge_and_unload, and give the folder of the result as model.path"
    kind = settings.get("peft_type")
    init = settings.get("init_lora_weights", True)
    require(kind == "LORA", field_name, path, f"is an adapter of type {kind}, not LORA", remedy=remedy)
    reason = f"changed its base when it was made (init_lora_weights={init!r})"
    require(init in KEPT_BASE, field_name, path, reason, remedy=remedy)
    saved_modules = settings.get("modules_to_save") or []
    if scalar and SCALAR_HEAD not in saved_modules:
        reason = "is an adapter without a scalar head"
        raise FieldError(field_name, path, reason, remedy="give one of a reward model, or start without an adapter")
    other = set(saved_modules)
    if scalar:
        other -= {SCALAR_HEAD, "classifier"}
    require(not other, field_name, path, f"also has the whole of {', '.join(sorted(other))}", remedy=remedy)
    plain = vars(LoraConfig())
    for name, value in settings.items():
        if name not in FREE and (value or None) != (plain.get(name) or None):
            raise FieldError(field_name, path, f"has {name}={value!r}, which proxima does not support", remedy=remedy)
    targets: Any = settings.get("target_modules")
    if not isinstance(targets, list) or not targets:
        listing = f"list the names of the layers in {CONFIG}"
        raise FieldError(field_name, path, f"has no list of target_modules, but {targets!r}", remedy=listing)
    excluded: Any = settings.get("exclude_modules") or []
    if not isinstance(excluded, list):
        reason = f"has exclude_modules={excluded!r}, which proxima does not support"
        raise FieldError(field_name, path, reason, remedy=remedy)
    reason = f"has exclude_modules={excluded!r}, which are among its target_modules"
    require(set(excluded).isdisjoint(targets), field_name, path, reason, remedy=remedy)
    rank = settings.get("r")
    alpha = settings.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise FieldError(field_name, path, f"has r={rank!r} and lora_alpha={alpha!r}, which must be numbers")
    return Lora(
        rank=rank,
        alpha=float(alpha),
        targets=tuple(sorted(targets)),
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
    )


def check_start(lora: Lora, path: str, revision: str | None, *, scalar: bool = False) -> None:
    """Refuse a `lora.path` that does not match the other settings or the model at `path`; nothing is loaded.

    Raises:
        FieldError: names the field, and the remedy.
    """
    assert lora.path is not None
    remedy = f"give a folder with {CONFIG}"
    require(is_adapter(lora.path), "model.lora.path", lora.path, "is not an adapter", remedy=remedy)
    there = read_settings(lora.path, field_name="model.lora.path", scalar=scalar)
    here = BaseModel(path=path, revision=revision, files=weight_files(path, revision))
    check_base(lora.path, here, field_name="model.lora.path")
    for name in ("rank", "alpha", "rslora", "dora"):
        adapters = getattr(there, name)
        if adapters != getattr(lora, name):
            reason = f"differs from {adapters!r}, that of the adapter {lora.path}"
            raise FieldError(f"model.lora.{name}", getattr(lora, name), reason, remedy=f"set it to {adapters!r}")


def start_adapter(model: nn.Module, lora: Lora, base: BaseModel, seed: int) -> None:
    """Call `attach`, then load the matrices of `lora.path` if it is set.

    Raises:
        FieldError: as `check_start`, or the adapter can't be read.
    """
    if lora.path is not None:
        check_start(lora, base.path, base.revision, scalar=hasattr(model, SCALAR_HEAD))
    attach(model, lora, seed)
    if lora.path is not None:
        read_matrices(model, lora.path, field_name="model.lora.path")


def read_matrices(model: nn.Module, path: str, *, field_name: str) -> None:
    """Copy an adapter's matrices into those of `model`.

    Raises:
        FieldError: they can't be read, do not match those of the model, or are not finite.
    """
    place = Path(path).expanduser() / WEIGHTS
    try:
        tensors = load_file(place)
    except (OSError, SafetensorError) as error:
        raise FieldError(field_name, path, f"has no readable {WEIGHTS} ({error})") from error
    parameters = dict(model.named_parameters())
    trained = {_file_name(name): parameters[name] for name in trained_names(model)}
    odd = sorted(trained.keys() ^ tensors.keys())
    if odd:
        verb = "lacks" if odd[0] in trained else "has"
        reason = f"{verb} {odd[0]} ({len(odd)} differences in all)"
        remedy = "set model.lora.targets to those of the adapter, which are in its adapter_config.json"
        raise FieldError(field_name, path, reason, remedy=remedy)
    with torch.no_grad():
        for name, parameter in trained.items():
            value = tensors[name]
            if value.shape != parameter.shape:
                reason = f"has {name} of shape {list(value.shape)}, and this model needs {list(parameter.shape)}"
                raise FieldError(field_name, path, reason, remedy="use the base that the adapter was made for")
            if not bool(value.isfinite().all()):
                raise FieldError(field_name, path, f"holds NaN or infinity in {name}", remedy="use another checkpoint")
            parameter.copy_(value)


def save_adapter(loaded: LoadedModel, folder: Path, trained: Mapping[str, Tensor] | None = None) -> Path:
    """Write the adapter of a model, without the base, in the layout of this module's docstring. `trained`: the tensors
    of a sharded model by `trained_names`; None: those of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = loaded.model
    base = loaded.base
    assert base is not None
    _write(folder / BASE, {"dtype": base.dtype, "files": dict(base.files)})
    write_matrices(model, folder, base.path, base.revision, trained)
    if hasattr(model, SCALAR_HEAD):
        write_config(model, folder)
    write_tokenizer(loaded.tokenizer, input_files_of(model), folder)
    ordinary_modes(folder)
    return folder


def write_matrices(
    model: nn.Module, folder: Path, base: str, revision: str | None, trained: Mapping[str, Tensor] | None = None
) -> None:
    """Write what peft itself reads of an adapter: its config, and the matrices; `trained` as for `save_adapter`. The
    config lacks fields that an older peft would refuse, where they say what it does without them."""
    from peft import LoraConfig

    untyped: Any = model
    settings = untyped.peft_config[ADAPTER].to_dict()
    settings |= {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    settings["modules_to_save"] = [SCALAR_HEAD] if hasattr(model, SCALAR_HEAD) else None
    plain = vars(LoraConfig())
    written = {}
    for name, value in settings.items():
        if name in OLDEST or value != plain.get(name):
            written[name] = sorted(value) if isinstance(value, set) else value
    _write(folder / CONFIG, written)
    parameters = trained or dict(model.named_parameters())
    tensors = {_file_name(name): parameters[name].detach().cpu().contiguous() for name in trained_names(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _file_name(name: str) -> str:
    """peft's name of a parameter in its files; the vector of DoRA has no `.weight`."""
    plain = name.replace(f".{ADAPTER}.", ".")
    if "lora_magnitude_vector" in plain:
        plain = plain.removesuffix(".weight")
    return PREFIX + plain


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_merged(path: str, load_base: Callable[[str, str | None], LoadedModel], *, scalar: bool = False) -> LoadedModel:
    """Load an adapter's base and merge the adapter into its weights.

    Args:
        path: the adapter's folder.
        load_base: loads the base from its path and revision.
        scalar: the base becomes a scalar model, with the adapter's head.

    Raises:
        FieldError: as `load`.
    """
    check_path(path)
    settings = read_settings(path, field_name="model.path", scalar=scalar)
    wanted = base_of(path)
    here = replace(wanted, files=weight_files(wanted.path, wanted.revision))
    check_base(path, here, field_name="model.path")
    tokenizer = load_tokenizer(path)
    require_rows(path, tokenizer, load_config(wanted.path, wanted.revision))
    loaded = load_base(wanted.path, wanted.revision)
    attach(loaded.model, settings, 0)
    read_matrices(loaded.model, path, field_name="model.path")
    merge_adapter(loaded.model)
    return replace(loaded, path=path, tokenizer=tokenizer)


def with_adapter(
    loaded: LoadedModel, lora: Lora, *, revision: str | None, dtype: torch.dtype, seed: int
) -> LoadedModel:
    """Put adapters on a model that was just loaded with these arguments; one that was read by slices has them.

    Raises:
        FieldError: as `start_adapter`.
    """
    base = base_in_memory(loaded.path, revision, dtype)
    if loaded.sharding is None:
        start_adapter(loaded.model, lora, base, seed)
    return replace(loaded, base=base)
