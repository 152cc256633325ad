"""The `model` section, and its checks against the files and devices of this machine. No weights are loaded."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.config.problems import nearest
from proxima.config.recipe_reader import shown_path
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections import CRITICS
from proxima.config.sections.train_section import OptimizationConfig
from proxima.data import FieldError, UserError, require
from proxima.model.adapter_folder import base_of
from proxima.model.demo_path import is_downloadable
from proxima.model.files import ADAPTER_CONFIG as ADAPTER
from proxima.model.hub_names import looks_like_hub_name, near_folder, two_readings
from proxima.model.lora import Lora
from proxima.model.pretrained import UnloadedModel, check_device, check_path, export_remedy, is_run, load_shape
from proxima.train import OPTIMIZERS

if TYPE_CHECKING:
    from proxima.model.model_source import ModelSource

BFLOAT16_STEP = 2**-8
Attention = Literal["auto", "packed", "varlen", "padded"]
TYPICAL_WEIGHT = 0.02  # the standard deviation with which most models are initialised


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[str, "Hugging Face name, folder, or .gguf file"]
    revision: Annotated[str | None, "hub revision"] = None
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the master weights"] = "float32"
    compute_dtype: Annotated[Literal["float32", "bfloat16"], "autocast dtype of forward and backward"] = "bfloat16"
    device: Annotated[str, "auto, cpu, cuda, cuda:1"] = "auto"
    attention: Annotated[Attention, "keeps packed sequences apart; varlen: flash attention, on a GPU"] = "auto"
    share_prompt: Annotated[bool, "run a group's prompt, and what prompts begin with, once in training"] = True
    gradient_checkpointing: Annotated[bool, "trade compute for activation memory"] = False
    log_prob_chunk: Annotated[int, "tokens, rows of the [chunk, vocabulary] logits alive at once"] = 512
    max_length: Annotated[int | None, "tokens, prompt + completion; null: the model's own limit"] = None
    lora: Annotated[Lora | None, "train adapters in place of the weights; null: off"] = None

    def __post_init__(self) -> None:
        require(self.log_prob_chunk >= 1, "log_prob_chunk", self.log_prob_chunk, "must be >= 1")
        require(self.max_length is None or self.max_length >= 2, "max_length", self.max_length, "must be >= 2")

    def unloaded(self) -> UnloadedModel:
        """The model before its weights are loaded. Raises as `UnloadedModel.read`."""
        return UnloadedModel.read(self.path, self.revision, self.max_length)

    def source(self, seed: int = 0, placement: Any = None) -> "ModelSource":
        """The model by its name, with the settings of its forward pass; `seed` is for new adapters and heads. With a
        placement on several ranks, it is sharded over these."""
        from proxima.model.model_source import ModelSource

        sharding = None
        if hasattr(placement, "sharding") and os.environ.get("WORLD_SIZE") != "1":
            from proxima.model.parallel.sharding import Sharding

            sharding = Sharding.of(placement)

        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "max_length"}
        return ModelSource(**settings, seed=seed, sharding=sharding)


def model_exists(model: ModelConfig) -> Findings:
    """A local path must exist and be a model folder or a .gguf file."""
    if remedy := model_problem(model.path):
        yield "model.path", remedy


def adapters_are_ready(r: Resolved[Any], model: ModelConfig) -> Findings:
    """The targets must be layers of the model, and an adapter to start from must be one for this model."""
    if (lora := model.lora) is None:
        return
    from proxima.model.adapter_files import check_start
    from proxima.model.lora_layers import target_layers

    if (Path(model.path) / ADAPTER).is_file():
        yield "model.path", "is an adapter; write its base there, and the adapter as model.lora.path"
    elif lora.path is not None and lora.init != Lora.init:
        yield "model.lora.init", "draws a new adapter, and model.lora.path is one; set one of the two"
    else:
        try:
            if lora.path is not None:
                check_start(lora, model.path, model.revision, scalar=hasattr(r.config, "reward_model"))
            if (Path(model.path) / "config.json").is_file():  # a hub name would need a request to the hub
                target_layers(load_shape(model.path), lora)
        except FieldError as error:
            if error.field.startswith("model.lora"):
                yield error.field, error.requirement


def dtypes_are_consistent(model: ModelConfig) -> Findings:
    """Autocast never raises the precision of products: weights in bfloat16 have products in bfloat16."""
    if model.compute_dtype == "float32" and model.dtype == "bfloat16":
        message = "has no effect: weights in bfloat16 (model.dtype) have products in bfloat16; set both to one dtype"
        yield "model.compute_dtype", message


def weights_resolve_an_update(r: Resolved[Any], model: ModelConfig, train: OptimizationConfig) -> Findings:
    """Warn if rounding loses updates of Adam, about `lr` per weight: bfloat16 resolves 2^-8 of a weight. An adapter is
    float32; a critic with its own weights is trained in full even with one."""
    if model.dtype != "bfloat16":
        return
    critic = r.get("critic")
    trained = {} if model.lora is not None else {"train.optimizer.lr": train.optimizer}
    if CRITICS.holds(critic, "model") and (critic.optimizer is not None or not trained):
        path = "train" if critic.optimizer is None else "critic"
        trained[f"{path}.optimizer.lr"] = critic.optimizer or train.optimizer
    for path, optimizer in trained.items():
        relative = optimizer.lr / TYPICAL_WEIGHT if OPTIMIZERS.holds(optimizer, *OPTIMIZERS) else BFLOAT16_STEP
        if not 0 < relative < BFLOAT16_STEP:
            continue
        message = f"an update moves a weight of {TYPICAL_WEIGHT:g} by about {relative:.2g} of itself, and model.dtype="
        message += f"bfloat16 resolves 2^-8 = {BFLOAT16_STEP:.2g}: weights above {optimizer.lr / BFLOAT16_STEP:.1g}"
        remedy = "set model.dtype=float32 (model.compute_dtype=bfloat16 keeps the speed), or raise the learning rate"
        yield path, f"{message} do not change; {remedy}"


def device_exists(model: ModelConfig) -> Findings:
    """The device must be of a known kind and exist on this machine."""
    try:
        check_device(model.device, "model.device")
    except FieldError as error:
        yield "model.device", error.requirement


def completions_fit_context(r: Resolved[Any], model: ModelConfig) -> Findings:
    """`max_tokens` must leave room for a prompt in the context."""
    limit, name = model.max_length, "model.max_length"
    if limit is None:
        folder = base_of(model.path).path if (Path(model.path) / ADAPTER).is_file() else model.path
        limit = _config_json(folder).get("max_position_embeddings")
        name = f"max_position_embeddings in {shown_path(Path(folder) / 'config.json')}"
    if not isinstance(limit, int) or limit <= 0:
        return
    for path, sampling in ((path, r.get(path)) for path in ("sampling", "eval.sampling")):
        if sampling is not None and sampling.max_tokens >= limit:
            message = f"leaves no room for a prompt: the context is {limit} tokens ({name}); lower it"
            yield f"{path}.max_tokens", message


def reward_head_is_new(model: ModelConfig, reward_model: Any) -> Findings:
    """Refuse `head_std` for a reward model that is trained further and keeps its head."""
    if reward_model.head_std != type(reward_model).head_std and has_score(model.path):
        message = f"is for a new head, and {model.path} has one, which is trained further; leave it out"
        yield "reward_model.head_std", message


def has_score(path: str) -> bool:
    """True for the local folder of a scalar model; False for a hub name, which is not looked up."""
    names = _config_json(path).get("architectures")
    return isinstance(names, list) and any("SequenceClassification" in str(name) for name in names)


def _config_json(folder: str) -> dict[str, Any]:
    """The config.json of a folder; empty if it is missing or can't be read."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def refuse_checkpoint(model: str, checkpoint: str) -> None:
    """Raise UserError if a checkpoint other than the last is named for a model that is not a run."""
    if checkpoint != "last":
        raise UserError(f"{model} is a model, which has no checkpoints", remedy="leave --checkpoint out")


def model_problem(path: str) -> str | None:
    """The reason why `path` is not a model, with the remedy; None if it may be one."""
    place = Path(path)
    if is_downloadable(path):
        from proxima.model.demo_model import missing_reader

        return missing_reader()
    if (place / ADAPTER).is_file():
        try:
            check_path(path)
        except FieldError as error:
            return error.requirement
        from proxima.model.lora_layers import missing_peft

        return missing_peft()
    if is_run(place):
        return f"is a run, not its model; {export_remedy(path)}"
    if place.is_dir():
        there = (place / "config.json").is_file()
        return None if there else "is a folder without config.json; give a Hugging Face model folder or a .gguf file"
    if place.is_file():
        remedy = "is a file but not .gguf; give the folder that holds config.json, or a .gguf file"
        return None if place.suffix == ".gguf" else remedy
    if place.exists():
        return "is neither a file nor a folder but a device, a pipe or a socket; give a folder or a .gguf file"
    if looks_like_hub_name(path):
        return None
    where = "" if place.is_absolute() or path.startswith("~") else ": a path is relative to the current folder"
    remedy = (
        f"{did_you_mean(place) or near_folder(path)}give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B"
    )
    return f"does not exist{where}; {remedy}{two_readings(path)}"


def did_you_mean(place: Path) -> str:
    """The hint `did you mean models/m? Else ` for a path that does not exist; empty if its folder has nothing
    similar."""
    near = nearest(place.name, (child.name for child in place.parent.glob("*")))
    return f"did you mean {shown_path(place.parent / near)}? Else " if near else ""
