"""Writes everything of a model's folder but its weights, so that transformers 4 and 5, and servers of either, read the
same model.

What the run did not change is the input's: the files of its tokenizer, processors and generation settings byte for
byte, and each field of its config.json in its own spelling. A config that transformers 5 wrote also gets the names that
version 4 reads, which else takes its defaults without a word: `rope_theta`, `rope_scaling`, `torch_dtype` …
"""

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxima.data.json_reader import load_json
from proxima.model.architecture import SCALAR_HEAD, untie_config
from proxima.model.input_files import CONFIG, GENERATION, InputFiles, input_files_of, read_whole, tokenizer_facts
from proxima.model.parallel.sharding import plain_type

ROPE = "rope_parameters"
DTYPES = ("dtype", "torch_dtype")  # names of one field
# fields that say how a file was written or read, not what the model is
OF_THE_FILE = {*DTYPES, "_name_or_path", "architectures", "name_or_path", "transformers_version"}
OF_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # ends of names of classes
TOKENIZER = "tokenizer_config.json"
PROCESSOR = "processor_config.json"  # the end of its name, of a processor of images, videos, or both
# classes of tokenizers that only transformers 5 knows → those by which both mean the same
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
OLDER_BASES = {  # by model type, the older names of the base of positions, and of that of layers with a window
    "gpt_neox": ("rotary_emb_base", None),
    "gpt_neox_japanese": ("rotary_emb_base", None),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
}
BASES = ("rope_theta", "rope_local_base_freq")
# by model type, the field of the kinds of layers, where version 4 knows them by older names alone
LAYERS = {"granitemoehybrid": "layer_types", "zamba2": "layers_block_type"}
OLDER_LAYERS = {"full_attention": "attention", "linear_attention": "mamba", "mamba2": "mamba"}
EXPERTS = "num_local_experts"  # for families that had
OLDER_EXPERTS = "num_experts"
WIDTH = "hidden_size"  # of the part about text; version 4 reads it outside of that too for a type of:
WIDTH_OUTSIDE = ("fuyu",)
OLDER_SHARES = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
LONG_ROPE = {  # model types that take exactly these fields of a scaling, and call its kind `type`
    "phi3": ("short_factor", "long_factor"),
    "phi4_multimodal": ("short_factor", "long_factor"),
    "phimoe": ("short_factor", "long_factor", "short_mscale", "long_mscale", "original_max_position_embeddings"),
}


def save_settings(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write everything of a model's folder except the weights; the model may be sharded, or have adapters.

    Args:
        tokenizer: None: write none.
        folder: created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(model, folder)
    files = input_files_of(model)
    if model.can_generate():
        _write_generation(model.generation_config, files, folder)
    if tokenizer is not None:
        write_tokenizer(tokenizer, files, folder)


def write_config(model: Any, folder: Path) -> None:
    """Write config.json."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = None
    untie_config(model, config)
    files = input_files_of(model)
    scalar = hasattr(model, SCALAR_HEAD)
    if files is None:
        fields = _plain(config, full=False)
    else:
        fields = _changed_config(config, files.config, whole=not scalar and not files.left_out)
    of_text = _text_part(fields, config)
    named = fields.get("architectures") or []
    own_class = files is None or scalar or bool(files.left_out)
    if own_class or not any(str(name).endswith(OF_LANGUAGE_MODELS) for name in named):
        fields["architectures"] = [plain_type(model).__name__]
    dtype = str(model.dtype).removeprefix("torch.")
    _set_dtype(of_text, dtype)
    _set_dtype(fields, dtype)
    fields.setdefault("torch_dtype", dtype)
    if fields.get("model_type") in WIDTH_OUTSIDE and WIDTH in of_text:
        fields.setdefault(WIDTH, of_text[WIDTH])
    for part in (of_text, fields):
        _add_older_rope(config, part)
        layers = LAYERS.get(str(part.get("model_type")))
        if layers in part:
            part[layers] = [OLDER_LAYERS.get(kind, kind) for kind in part[layers]]
        if EXPERTS in part and config.attribute_map.get(OLDER_EXPERTS) == EXPERTS:
            part.setdefault(OLDER_EXPERTS, part[EXPERTS])
    _write_json(folder / CONFIG, fields)


def _plain(config: Any, *, full: bool) -> dict[str, Any]:
    """The fields of a config as in a file, all of them or those that differ from what every config has."""
    return with_infinities(load_json(config.to_json_string(use_diff=not full)))


def with_infinities(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a file's fields with infinite numbers in the place of the objects that transformers 5 writes for them,
    and version 4 does not know."""
    from transformers import PreTrainedConfig

    decoded: dict[str, Any] = PreTrainedConfig._decode_special_floats(dict(fields))
    return decoded


def _changed_config(config: Any, original: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The fields of the input's config.json with what the run changed.

    Args:
        config: the model's now: of the input's class, or of the class of its part about text.
        whole: all weights of the input are written; False: only those of that part.
    """
    fields = with_infinities(original)
    read = _config_of(fields, type(config))
    if type(read) is type(config):
        _apply(fields, _plain(read, full=True), _plain(config, full=True))
        return fields
    of_text = fields.get(_text_key(read), fields)
    _apply(of_text, _plain(read.get_text_config(), full=True), _plain(config, full=True))
    if whole or of_text is fields:
        return fields
    return {**of_text, "model_type": config.model_type}


def _config_of(fields: Mapping[str, Any], otherwise: Any) -> Any:
    """The config that transformers reads from the fields of a file."""
    from transformers import CONFIG_MAPPING

    kind = str(fields.get("model_type"))
    config_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else otherwise  # noqa: SIM401 (`get` imports none)
    return config_class.from_dict(copy.deepcopy(dict(fields)))


def _text_key(config: Any) -> str:
    """The name of the part about text of a config that has parts; empty without one."""
    of_text = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is of_text), "")


def _text_part(fields: dict[str, Any], config: Any) -> dict[str, Any]:
    part = fields.get(_text_key(_config_of(fields, type(config))))
    return part if isinstance(part, dict) else fields


def _apply(fields: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Change those of the fields that differ between two readings of them."""
    for name in sorted(before.keys() | now.keys()):
        value = before.get(name)
        new = now.get(name)
        if value == new or name in OF_THE_FILE:
            continue
        inside = fields.get(name)
        if name.endswith("_config") and isinstance(inside, dict) and isinstance(value, dict) and isinstance(new, dict):
            _apply(inside, value, new)
        elif name in now:
            fields[name] = new
        else:
            fields.pop(name, None)
        if name == ROPE:
            for older in ("rope_theta", "rope_scaling"):
                fields.pop(older, None)


def _set_dtype(fields: dict[str, Any], dtype: str) -> None:
    for name in DTYPES:
        if isinstance(fields.get(name), str):
            fields[name] = dtype


def _add_older_rope(config: Any, fields: dict[str, Any]) -> None:
    """Add the names that transformers 4 reads in place of `rope_parameters`, unless version 5 would then read something
    else, as for a family that had none."""
    rope = fields.get(ROPE)
    if not isinstance(rope, dict) or not rope:
        return
    older = _older_rope(str(fields.get("model_type")), rope)
    more = {name: value for name, value in older.items() if name not in fields}
    read = _rope_read(config, fields)
    if read is not None and read == _rope_read(config, fields | more):
        fields |= more


def _rope_read(config: Any, fields: Mapping[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of older names
            rope = getattr(_config_of(fields, type(config)), ROPE, None)
    except Exception:  # of any kind, from the checks of a family
        return None
    # `type` is the older name of `rope_type`, which is beside it
    if isinstance(rope, dict):
        return {name: value for name, value in rope.items() if name != "type"}
    return None


def _older_rope(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The older fields for the settings of rotary positions, which may be nested by the kind of layer."""
    base, local_base = OLDER_BASES.get(kind, BASES)
    nested = any(isinstance(part, dict) for part in rope.values()) and "rope_theta" not in rope
    whole = rope
    window: Mapping[str, Any] = {}
    if nested:
        whole = rope.get("full_attention") or {}
        window = rope.get("sliding_attention") or {}
    older = {base: whole.get("rope_theta")}
    if local_base is not None and "rope_theta" in window:
        older[local_base] = window["rope_theta"]
    if "partial_rotary_factor" in whole:
        older[OLDER_SHARES.get(kind, "partial_rotary_factor")] = whole["partial_rotary_factor"]
    apart = ("rope_theta", "partial_rotary_factor", "type")
    scaling = {name: value for name, value in whole.items() if name not in apart}
    if kind in LONG_ROPE and "long_factor" in scaling:
        taken = LONG_ROPE[kind]
        scaling = {"type": scaling["rope_type"], **{name: scaling[name] for name in taken if name in scaling}}
    if scaling in ({}, {"rope_type": "default"}):
        older["rope_scaling"] = None
    else:
        older["rope_scaling"] = scaling
    return {name: value for name, value in older.items() if value is not None or name == "rope_scaling"}


def _write_generation(generation: Any, files: InputFiles | None, folder: Path) -> None:
    """Write generation_config.json: the input's, unless the run changed it."""
    from transformers import GenerationConfig

    file = None if files is None else files.settings.get(GENERATION)
    if file is not None:
        content = read_whole(file)
        if _generation_fields(GenerationConfig.from_dict(load_json(content))) == _generation_fields(generation):
            (folder / GENERATION).write_bytes(content)
            return
    generation.save_pretrained(folder)


def _generation_fields(generation: Any) -> dict[str, Any]:
    fields: dict[str, Any] = generation.to_dict()
    return {name: value for name, value in fields.items() if not name.startswith("_") and name not in OF_THE_FILE}


def write_tokenizer(tokenizer: Any, files: InputFiles | None, folder: Path) -> None:
    """Write the files of a tokenizer, and of the processors beside it: the input's, unless the tokenizer is another."""
    settings = {} if files is None else files.settings
    unchanged = files is not None and TOKENIZER in settings and files.tokenizer == tokenizer_facts(tokenizer)
    if not unchanged:
        tokenizer.save_pretrained(folder)
    for name, file in settings.items():
        if name.endswith(PROCESSOR) or (unchanged and name != GENERATION):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_whole(file))
    _rename_tokenizer(folder / TOKENIZER)


def _rename_tokenizer(file: Path) -> None:
    """Let a tokenizer's config name a class, and its special tokens, as transformers 4 does too."""
    fields = load_json(file.read_text(encoding="utf-8"))
    own = fields.get("tokenizer_class")
    extra = fields.get("extra_special_tokens")
    if own not in TOKENIZER_CLASSES and not isinstance(extra, list):
        return
    if own in TOKENIZER_CLASSES:
        fields["tokenizer_class"] = TOKENIZER_CLASSES[own]
        fields.pop("backend", None)
    if isinstance(extra, list):
        del fields["extra_special_tokens"]
        fields["additional_special_tokens"] = extra
    _write_json(file, fields)


def _write_json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
