"""The `model` section, and its checks against the files and devices of this machine. No weights are loaded."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from proxima.config.describe import kind_of, setting
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections import CRITICS
from proxima.config.sections.train import OptimizationConfig
from proxima.data import FieldError, UserError, require
from proxima.data.json_reader import load_json
from proxima.engine import ENGINES
from proxima.engine.local.decoders import first_proven
from proxima.engine.local.fast_decoder import supports
from proxima.engine.serve.launch import ADAPTER_RANKS
from proxima.model.adapters.adapter_files import check_start
from proxima.model.adapters.lora import Lora, missing_peft, target_layers
from proxima.model.attention import require_flash3
from proxima.model.compilation import check_compiles
from proxima.model.demo_model import is_downloadable, missing_reader
from proxima.model.files import ADAPTER_CONFIG as ADAPTER
from proxima.model.files import base_of, local_place
from proxima.model.images.image_store import ImageStore
from proxima.model.model_source import ModelSource
from proxima.model.parallel.sharding import Sharding
from proxima.model.positions import require_known_length, require_length
from proxima.model.precision import ComputeDtype
from proxima.model.pretrained import (
    READERS,
    RESIZE,
    UnloadedModel,
    auto_device,
    check_device,
    check_path,
    load_config,
    load_shape,
    resolve_device,
    rowless_ids,
)
from proxima.model.proof import proof_before_loading
from proxima.model.scalar_model import scalar_config
from proxima.system.user_files import shown_path
from proxima.task.mix import sources_of
from proxima.training import OPTIMIZERS

MODELS = ("model.path", "critic.path", "algorithm.distillation.path")
BFLOAT16_STEP = 2**-8
TYPICAL_WEIGHT = 0.02  # the standard deviation with which most models are initialised
Attention = Literal["auto", "packed", "varlen", "flash3", "padded"]


UNSERVED = {"lm_head", "embed_out"}  # names of output heads


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[str, "Hugging Face name, folder, .gguf file, or a run: its newest checkpoint"]
    revision: Annotated[str | None, "hub revision"] = None
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the master weights"] = "float32"
    compute_dtype: Annotated[
        ComputeDtype, "of the matrix products of forward and backward (autocast); auto: the faster one on this machine"
    ] = "auto"
    device: Annotated[str, "auto, cpu, cuda, cuda:1"] = "auto"
    attention: Annotated[
        Attention, "keeps packed sequences apart; varlen: torch's flash attention, on a GPU; flash3: on Hopper GPUs"
    ] = "auto"
    share_prompt: Annotated[bool, "run a group's prompt, and what prompts begin with, once in training"] = True
    gradient_checkpointing: Annotated[bool, "trade compute for activation memory"] = False
    compile: Annotated[
        bool,
        "torch.compile each layer, but for experts that ranks split, and the output head: "
        "a minute more once; has only run on CPUs so far",
    ] = False
    log_prob_chunk: Annotated[
        int | None, "rows of logits alive at once; null: 512 on a CPU, 2,048 to 8,192 on a GPU, by its memory"
    ] = None
    max_length: Annotated[int | None, "tokens, prompt + completion; null: the model's own limit"] = None
    lora: Annotated[Lora | None, "train adapters in place of the weights; null: off"] = None
    vision_lr_ratio: Annotated[
        float, "share of the learning rate for the vision tower, and what connects it, of a model that is shown images"
    ] = 0.0

    def __post_init__(self) -> None:
        chunk = self.log_prob_chunk
        require(chunk is None or chunk >= 1, "log_prob_chunk", chunk, "must be >= 1")
        require(self.max_length is None or self.max_length >= 2, "max_length", self.max_length, "must be >= 2")
        ratio = self.vision_lr_ratio
        require(0 <= ratio <= 1, "vision_lr_ratio", ratio, "must be in [0, 1]", remedy="0 does not train it")
        untrained = ratio == 0 or self.lora is None
        require(untrained, "vision_lr_ratio", ratio, "must be 0: adapters (model.lora) are all that is trained")

    @property
    def adapter_rank(self) -> int:
        """The rank of the adapters that are trained; 0: the weights are."""
        return 0 if self.lora is None else self.lora.rank

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_device() if field == "device" else None

    def unloaded(self, shown: Iterable[Any] = (), run: Path | None = None) -> UnloadedModel:
        """The model before its weights are loaded, with a store of images if any of what is `shown`, tasks and
        episodes, has `images`: those of the folder of a `run`, if it has begun. Raises as `UnloadedModel.read` and
        `ImageStore`."""
        model = UnloadedModel.read(self.path, self.revision, self.max_length)
        if not any(setting(part, "images") for part in shown):
            return model

        return replace(model, tokenizer=ImageStore(self.path, self.revision, run and run / "images").tokenizer)

    def source(self, seed: int = 0, placement: Any = None) -> ModelSource:
        """The model by its name, with the settings of its forward pass; `seed` is for new adapters and heads. Where a
        placement `shards_models`, it is sharded over its ranks."""
        sharding = None
        if setting(placement, "shards_models"):
            sharding = Sharding.of(placement)

        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelSource(**settings, seed=seed, sharding=sharding)


def models_exist(r: Resolved[Any]) -> Findings:
    """The local paths of the model, its critic and its teacher must exist and be model folders or .gguf files."""
    for path in MODELS:
        place = r.get(path)
        if place is None:
            continue
        problem = model_problem(place)
        if problem:
            yield path, problem


def models_are_supported(r: Resolved[Any], model: ModelConfig) -> Findings:
    """The models that are on this machine must be proven on small copies, see `proxima.model.proof`; their weights are
    not read. `model.max_length` must be within the model's own limit, and set for longrope positions."""
    for path, place, scalar in _models(r, model):
        revision = model.revision if path == "model.path" else None
        if model_problem(place) or is_downloadable(place) or local_place(place, revision) is None:
            continue

        try:
            config = scalar_config_of(place, revision) if scalar else load_config(place, revision)
            if path == "model.path":
                require_length(config, model.max_length)
            require_known_length(config, model.max_length, "model.max_length")
            proof = proof_before_loading(config, model.max_length, scalar=scalar)
            asked = model.attention if path == "model.path" else "auto"
            attention = proof.attention(asked, recompute=model.gradient_checkpointing)
            if model.compile:
                parallel = r.get("placement.tensor_parallel") or 1
                check_compiles(config, attention=attention, tensor_parallel=parallel)
            engine = r.get("engine")
            if path == "model.path" and not scalar and ENGINES.holds(engine, "local", "local_process"):
                first_proven(proof, fast=engine.decoder != "general" and supports(proof.twin) is None)
        except FieldError as error:
            own = ("model.attention", "model.compile", "model.max_length")
            field = error.field if error.field in own else path
            yield field, error.requirement
        except UserError as error:
            yield path, str(error)


def _models(r: Resolved[Any], model: ModelConfig) -> Iterator[tuple[str, str, bool]]:
    """The field of each model of a recipe, its path, and whether it gets or has a scalar head."""
    yield "model.path", model.path, hasattr(r.config, "reward_model")
    critic = r.get("critic")
    if hasattr(critic, "path"):
        if critic.path:
            yield "critic.path", critic.path, True
        else:
            yield "critic.kind", model.path, True
    teacher = r.get("algorithm.distillation.path")
    if teacher is not None:
        yield "algorithm.distillation.path", teacher, False


def scalar_config_of(place: str, revision: str | None) -> Any:
    """The config of a model with a scalar head, which may be new."""
    return scalar_config(place, revision, new_head=True)[0]


def tokens_have_rows(r: Resolved[Any]) -> Findings:
    """Every id of a local tokenizer must have a row in the embedding of its model."""
    for path in MODELS:
        place = r.get(path)
        if place is None:
            continue
        problem = _vocabulary_problem(place)
        if problem:
            yield path, problem


def _vocabulary_problem(folder: str) -> str | None:
    """What is wrong with the ids of a model's tokenizer.json; None if nothing is, or a file is missing or can't be
    read, which loading reports."""
    place = Path(folder).expanduser()
    base = folder
    try:
        if (place / ADAPTER).is_file():
            base = base_of(folder).path
            if not (place / "tokenizer.json").is_file():
                place = Path(base).expanduser()
        config = _config_json(base)
        rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        if not isinstance(rows, int) or not (place / "tokenizer.json").is_file():
            return None
        stored = load_json((place / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = stored["model"].get("vocab") or {}
        if isinstance(vocabulary, list):  # of a unigram model: tokens with their scores, in the order of the ids
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
        problem = rowless_ids({**vocabulary, **added}, rows)
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return problem and f"{problem}; {RESIZE}"


def model_can_compute(model: ModelConfig) -> Findings:
    """The device must be of a known kind and exist on this machine. Autocast never raises the precision of products:
    weights in bfloat16 have products in bfloat16."""
    if model.compute_dtype == "float32" and model.dtype == "bfloat16":
        message = "has no effect: weights in bfloat16 (model.dtype) have products in bfloat16; set both to one dtype"
        yield "model.compute_dtype", message
    try:
        check_device(model.device, "model.device")
        require_flash3(model.attention, resolve_device(model.device))
    except FieldError as error:
        yield error.field, error.requirement


def completions_fit_context(r: Resolved[Any], model: ModelConfig) -> Findings:
    """`max_tokens` must leave room for a prompt in the context."""
    limit = model.max_length
    name = "model.max_length"
    if limit is None:
        folder = model.path
        if (Path(folder) / ADAPTER).is_file():
            folder = base_of(folder).path
        limit = _config_json(folder).get("max_position_embeddings")
        name = f"max_position_embeddings in {shown_path(Path(folder) / 'config.json')}"
    if not isinstance(limit, int) or limit <= 0:
        return
    for path, sampling in ((path, r.get(path)) for path in ("sampling", "eval.sampling")):
        if sampling is not None and sampling.max_tokens >= limit:
            message = f"leaves no room for a prompt: the context is {limit} tokens ({name}); lower it"
            yield f"{path}.max_tokens", message
    for source in sources_of(r.get("task")):
        length = source.sampling.get("max_tokens", 0)
        if length >= limit:
            message = f"leaves no room for a prompt: the context is {limit} tokens ({name}); lower it"
            yield f"{source.place}.sampling.max_tokens", message


def has_score(path: str) -> bool:
    """True for the local folder of a scalar model; False for a hub name, which is not looked up."""
    names = _config_json(path).get("architectures")
    return isinstance(names, list) and any("SequenceClassification" in str(name) for name in names)


def _config_json(folder: str) -> dict[str, Any]:
    """The config.json of a folder; empty if it is missing or can't be read."""
    try:
        config = load_json((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def refuse_checkpoint(model: str, checkpoint: str) -> None:
    """Raise UserError if a checkpoint other than the last is named for a model that is not a run."""
    if checkpoint != "last":
        raise UserError(f"{model} is a model, which has no checkpoints", remedy="leave --checkpoint out")


def model_problem(path: str) -> str | None:
    """The reason why `path` is not a model, with the remedy; None if it may be one."""
    if is_downloadable(path):
        return missing_reader()
    try:
        check_path(path)
    except FieldError as error:
        return error.requirement
    if path.endswith(".gguf"):
        missing = [name for name in READERS if find_spec(name) is None]
        if missing:
            return f"needs {' and '.join(missing)}: pip install 'proxima-rl[gguf]'"
    if (Path(path) / ADAPTER).is_file():
        return missing_peft()
    return None


def images_can_be_shown(r: Resolved[Any]) -> Findings:
    """Images are read by packed attention, and whole; of servers, vLLM reads them."""
    if not (r.get("task.images") or r.get("episode.images") or r.get("model.vision_lr_ratio")):
        return
    if not any(r.get(f"{part}.images") for part in ("task", "eval.task", "episode")):
        yield "model.vision_lr_ratio", "has no effect: neither task.images nor episode.images is set; set it to 0"
        return
    for number, reward in enumerate(r.get("reward") or ()):
        if kind_of(reward) == "model":
            yield f"reward.{number}.kind", "model reads no images, which prompts show; take another reward"
    engine = r.get("engine")
    kind = None if engine is None else kind_of(engine)
    if kind not in (None, "local", "local_process", "vllm"):
        yield "engine", f"{kind} can't be shown images; set engine.kind=local"
    attention = r.get("model.attention")
    if attention not in ("auto", "packed"):
        yield "model.attention", f"{attention} can't be shown images; set it to auto"
    for name in ("tensor_parallel", "context_parallel"):
        ranks = r.get(f"placement.{name}") or 1
        if ranks > 1:
            yield f"placement.{name}", "can't be combined with images; set it to 1"


def adapters_are_ready(r: Resolved[Any], model: ModelConfig) -> Findings:
    """The targets must be layers of the model, and an adapter to start from must be one for this model."""
    lora = model.lora
    if lora is None:
        return
    if (Path(model.path) / ADAPTER).is_file():
        with suppress(FieldError):  # said by `models_exist`
            base = base_of(model.path).path
            yield "model.path", f"is an adapter; set model.path={base} and model.lora.path={model.path}"
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


def adapters_can_be_served(r: Resolved[Any], model: ModelConfig, algorithm: Any) -> Findings:
    """`engine.adapters_only` needs adapters that vLLM computes with."""
    if not r.get("engine.adapters_only"):
        return
    path = "engine.adapters_only"
    lora = model.lora
    without = "engine.adapters_only=false"
    kind = kind_of(r.get("engine"))
    unserved = set[str]()
    if lora is not None and not isinstance(lora.targets, str):
        unserved = UNSERVED.intersection(lora.targets)
    if lora is None:
        yield path, f"sends the adapters alone, and model.lora is null; set model.lora={{}}, or {without}"
    elif kind != "vllm":
        yield path, f"is not possible with {kind}, which replaces no adapter that requests are using; set it to false"
    elif lora.dora:
        yield "model.lora.dora", f"can't be combined with engine.adapters_only: vLLM computes no DoRA; set {without}"
    elif lora.rank > ADAPTER_RANKS[-1]:
        yield "model.lora.rank", f"is at most {ADAPTER_RANKS[-1]} with engine.adapters_only; lower it, or set {without}"
    elif unserved:
        reason = (
            f"{min(unserved)} can't be combined with engine.adapters_only, which sends no adapter of the output head"
        )
        yield "model.lora.targets", f"{reason}; leave it out, or set {without}"


def weights_resolve_an_update(r: Resolved[Any], model: ModelConfig, train: OptimizationConfig) -> Findings:
    """Warn if rounding loses updates of Adam, about `lr` per weight: bfloat16 resolves 2^-8 of a weight. An adapter is
    float32; a critic with its own weights is trained in full even with one."""
    if model.dtype == "float32":
        return
    critic = r.get("critic")
    trained = {}
    if model.lora is None:
        trained["train.optimizer.lr"] = train.optimizer
    if CRITICS.holds(critic, "model") and (critic.optimizer is not None or not trained):
        path = "train" if critic.optimizer is None else "critic"
        trained[f"{path}.optimizer.lr"] = critic.optimizer or train.optimizer
    for path, optimizer in trained.items():
        if not OPTIMIZERS.holds(optimizer, *OPTIMIZERS):
            continue
        relative = optimizer.lr / TYPICAL_WEIGHT
        if not 0 < relative < BFLOAT16_STEP:
            continue
        message = f"an update moves a weight of {TYPICAL_WEIGHT:g} by about {relative:.2g} of itself, and model.dtype="
        message += f"bfloat16 resolves 2^-8 = {BFLOAT16_STEP:.2g}: weights above {optimizer.lr / BFLOAT16_STEP:.1g}"
        remedy = "set model.dtype=float32 (model.compute_dtype=bfloat16 keeps the speed), or raise the learning rate"
        yield path, f"{message} do not change; {remedy}"
