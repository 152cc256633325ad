"""Reads config, shape and tokenizer from a model's path, and explains failures; `load` reads weights."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from proxima.data import FieldError, renamed, require
from proxima.data.errors import abbreviated
from proxima.model.adapters.lora import adapter_names
from proxima.model.architecture import TextConfig, reader_of
from proxima.model.chat.answer import turn_end
from proxima.model.chat.encode import image_store_of
from proxima.model.chat.template_budget import bounded_environment
from proxima.model.files import (
    BaseModel,
    base_of,
    check_model_files,
    is_adapter,
    local_place,
    refuse_partial_weights,
    refuse_pointers,
    require_found,
    require_hub_name,
)
from proxima.model.parallel.sharding import Sharding
from proxima.model.positions import context_limit, require_length
from proxima.system.user_files import POINTER_BOUND, PULL, is_pointer

if TYPE_CHECKING:  # transformers takes seconds to import: a mistyped recipe must not wait for it
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


LONGEST_REASON = 300  # characters, of an error of transformers
READERS = ("gguf", "accelerate")  # what transformers needs to read a .gguf file
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
RESIZE = "resize the embedding (resize_token_embeddings of transformers) and save the model, or use its own tokenizer"
PROBE = "Hello, World! 12 + 3\n\t naïve 漢字 🙂"
MOST_TOKENS = 100  # a character, in the probe


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its tokenizer and path; `base` is the base of its adapter, None without one. On many ranks,
    `sharding` says how it is split, and `device` is where this rank computes; its weights may be stored elsewhere.
    `vision_lr_ratio`: the share of the learning rate with which its `vision_parameters` are trained, if it is shown
    images."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    path: str
    base: BaseModel | None = None
    sharding: Sharding | None = None
    device: torch.device | None = None
    vision_lr_ratio: float = 0.0

    @property
    def images(self) -> Any:
        """The `ImageStore` of its prompts, which its tokenizer has; None: they are of text alone."""
        return image_store_of(self.tokenizer)

    @property
    def name(self) -> str:
        """Short name for display."""
        place = PurePath(self.path)
        if place.match("checkpoints/*/model") and place.parent.name.isdecimal():  # of a run: `grpo step 40`
            return f"{place.parents[2].name} step {int(place.parent.name)}"
        return place.name

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once, an adapter's not."""
        return sum(p.numel() for p in self.model.parameters()) - self.adapter_parameters

    @property
    def adapter_parameters(self) -> int:
        """Number of an adapter's own parameters; 0 without one."""
        return sum(self.model.get_parameter(name).numel() for name in adapter_names(self.model))

    @property
    def max_length(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        return context_limit(self.model.config.get_text_config())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a completion; see `stop_tokens_of`."""
        return stop_tokens_of(getattr(self.model, "generation_config", None), self.model.config, self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class UnloadedModel:
    """The facts of a model that are known before its weights are loaded; prompt and completion may have `context`
    tokens together."""

    path: str
    revision: str | None
    config: "PretrainedConfig"
    tokenizer: Any
    context: int

    @property
    def images(self) -> Any:
        """The `ImageStore` of its prompts; None: they are of text alone."""
        return image_store_of(self.tokenizer)

    @classmethod
    def read(cls, path: str, revision: str | None = None, max_length: int | None = None) -> "UnloadedModel":
        """Read config and tokenizer; `max_length` bounds the context.

        Raises:
            FieldError: as `load_config`, `load_tokenizer`, `require_rows` and `require_length`.
        """
        config = load_config(path, revision)
        tokenizer = load_tokenizer(path, revision)
        require_rows(path, tokenizer, config)
        require_length(config, max_length)
        context = max_length or context_limit(config.get_text_config())
        return cls(path=path, revision=revision, config=config, tokenizer=tokenizer, context=context)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a completion by the model's own files."""
        return own_stop_tokens(load_generation_config(self.path, self.revision), self.config, self.tokenizer)

    @property
    def vocabulary(self) -> int:
        """The rows of the output layer."""
        return int(self.config.get_text_config().vocab_size)


def read_auxiliary_model(
    policy: UnloadedModel, path: str, revision: str | None, field: str, remedy: str
) -> UnloadedModel:
    """Read a model that computes on the policy's tokens, a teacher or a critic, before its weights are loaded.

    Args:
        field: names its path in errors.

    Raises:
        FieldError: it can't be read, or its token ids have a different meaning.
    """
    with renamed("model.path", field):
        other = UnloadedModel.read(path, revision)
    problem = _vocabulary_problem(policy.tokenizer.get_vocab(), other.tokenizer.get_vocab())
    if problem:
        raise FieldError(field, path, problem, remedy=remedy)
    return other


def _vocabulary_problem(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Describe how another model's vocabulary differs from the policy's; None if every token has the same id in
    both."""
    different = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
    if not different:
        return None

    def place(token: str) -> tuple[int, str]:
        ids = [vocabulary[token] for vocabulary in (ours, theirs) if token in vocabulary]
        return min(ids), token

    token = min(different, key=place)
    there = f"id {theirs[token]}" if token in theirs else "missing"
    here = f"id {ours[token]}" if token in ours else "missing"
    return f"has another vocabulary: {token!r} is {there} there and {here} in model.path ({len(different):,} differ)"


def require_rows(path: str, tokenizer: Any, config: Any) -> None:
    """Raise FieldError for a tokenizer with ids that have no row in the model's embedding."""
    rows = TextConfig.of(config).vocabulary
    problem = rowless_ids(tokenizer.get_vocab(), rows) if rows else None
    if problem:
        raise FieldError("model.path", path, problem, remedy=RESIZE)


def rowless_ids(vocabulary: Mapping[str, int], rows: int) -> str | None:
    """Describe the ids of a vocabulary that have no row in an embedding, as after added tokens without a resize; None
    if all have one. More rows than tokens are usual: vocabularies are padded."""
    beyond = sorted((i, token) for token, i in vocabulary.items() if i >= rows)
    if not beyond:
        return None
    first, token = beyond[0]
    last, _ = beyond[-1]
    which = f"{token!r}, id {first}, has none"
    if len(beyond) > 1:
        which = f"{len(beyond):,} tokens, from {token!r}, id {first}, to id {last}, have none"
    return f"has a tokenizer of {last + 1:,} ids and an embedding of {rows:,} rows: {which}"


def stop_tokens_of(generation: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: those of `own_stop_tokens`, and the token with which the chat template ends a turn
    of the assistant, which base models, and some others, lack in their files."""
    own = own_stop_tokens(generation, config, tokenizer)
    end = turn_end(tokenizer)
    if end is None or end.token is None:
        return own
    return tuple(dict.fromkeys((*own, end.token)))


def own_stop_tokens(*sources: Any) -> tuple[int, ...]:
    """The ids that end a completion by a model's files: generation config, model config and tokenizer."""
    stop: list[Any] = []
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, list | tuple):
            stop += ids
        else:
            stop.append(ids)
    return tuple(dict.fromkeys(int(i) for i in stop if i is not None))


def check_device(device: str, field: str = "device") -> None:
    """Raise FieldError for a device of an unknown kind, or one that this machine lacks."""
    match = re.fullmatch(r"auto|cpu|cuda(?::([0-9]+))?", device)
    count = torch.cuda.device_count()
    require(match is not None, field, device, "is not a device of proxima; write auto, cpu, cuda or cuda:1")
    there = match is None or not device.startswith("cuda") or int(match[1] or 0) < count
    require(there, field, device, f"this machine has {count} CUDA devices", remedy=f"set {field}=cpu, or auto")


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA if available, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def auto_device() -> tuple[str, str]:
    """The device that `auto` chooses here, and the reason."""
    chosen = resolve_device("auto").type
    why = "this machine has a GPU that torch can use" if chosen == "cuda" else "torch finds no GPU"
    return chosen, why


def check_path(path: str) -> None:
    """Validate a model path before anything is loaded.

    Raises:
        FieldError: a local path that does not exist or is no model, or an adapter whose base is missing.
    """
    place = Path(os.path.expanduser(path))  # that of pathlib raises for a user who does not exist
    if is_adapter(path):
        refuse_pointers(path, place)
        refuse_partial_weights(path, place)
        base = base_of(path).path
        try:
            check_path(base)
        except FieldError as error:
            remedy = "restore it, or write where it is as base_model_name_or_path into adapter_config.json"
            raise FieldError(
                "model.path", path, f"is an adapter of {base}, which {error.bound}", remedy=remedy
            ) from None
    elif (place / "config.yaml").is_file() and (place / "metrics.jsonl").is_file():
        if not any((place / "checkpoints").glob("[0-9]*")):
            remedy = "wait for one: checkpoint.every, or the end of the run"
            raise FieldError("model.path", path, "is a run without a checkpoint", remedy=remedy)
        remedy = f"`proxima export {path} MODEL` writes it to a folder; give that"
        raise FieldError("model.path", path, "is a run, not its model", remedy=remedy)
    elif place.is_dir():
        remedy = "give a Hugging Face model folder or a .gguf file"
        complete = (place / "config.json").is_file()
        require(complete, "model.path", path, "is a folder without config.json", remedy=remedy)
        check_model_files(path, place)
    elif place.is_file():
        remedy = "give the folder that holds config.json, or a .gguf file"
        require(place.suffix == ".gguf", "model.path", path, "is a file but not .gguf", remedy=remedy)
        require(not is_pointer(place), "model.path", path, POINTER_BOUND, remedy=PULL)
    elif place.exists():
        reason = "is neither a file nor a folder but a device, a pipe or a socket"
        raise FieldError("model.path", path, reason, remedy="give a folder or a .gguf file")
    else:
        require_hub_name(path)


def _place_of(file: str, path: str, revision: str | None) -> tuple[str, str | None]:
    """Path and revision of the model whose folder has a file: for an adapter without it, its base's."""
    check_path(path)
    if not Path(path).expanduser().exists():
        require_found(path, revision)
        cached = local_place(path, revision)
        if cached is not None:
            check_model_files(path, cached, complete=False)  # what is missing is downloaded
    if not is_adapter(path) or (Path(path).expanduser() / file).is_file():
        return path, revision

    base = base_of(path)
    return _place_of(file, base.path, base.revision)


def load_config(path: str, revision: str | None = None) -> "PretrainedConfig":
    """The model's config, or its base's for an adapter without one; no weights are read (for GGUF, only the header)."""
    from transformers import AutoConfig

    path, revision = _place_of("config.json", path, revision)
    config: PretrainedConfig = read_pretrained(AutoConfig, path, revision, "can't be read")
    kernel = config._attn_implementation
    bound = f"names code of the hub for its attention, {kernel}"
    remedy = "leave attn_implementation out of config.json"
    require("/" not in str(kernel), "model.path", path, bound, remedy=remedy)  # transformers would download and run it
    bound = f"has config.json with the config of a part, such as text_config, which a {config.model_type} does not have"
    is_built = not isinstance(config.get_text_config(), dict)
    require(is_built, "model.path", path, bound, remedy="remove it from config.json, or download the folder again")
    return config


def load_generation_config(path: str, revision: str | None = None) -> "GenerationConfig | None":
    """The generation config by the model's authors, with the tokens that end a completion; None without one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:
        return None
    except Exception as error:
        raise unreadable_model(path, "has an unusable generation_config.json", error) from error


def load_shape(path: str, revision: str | None = None) -> "PreTrainedModel":
    """The model without weights (on the meta device), from its config.

    Raises:
        UserError: the config can't be read, or its architecture is not known.
    """
    from transformers import AutoModelForSequenceClassification

    config: Any = load_config(path, revision)
    scores = any("SequenceClassification" in name for name in config.architectures or ())
    kind: Any = AutoModelForSequenceClassification if scores else reader_of(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # of any kind, from the code of the model
        raise unreadable_model(path, "is not a model that can be built", error) from error
    return model


def load_tokenizer(path: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer, or its base's for an adapter whose folder has none."""
    from transformers import AutoTokenizer

    path, revision = _place_of("tokenizer_config.json", path, revision)
    bounded_environment()  # of chat templates
    tokenizer: PreTrainedTokenizerBase = read_pretrained(AutoTokenizer, path, revision, "has no usable tokenizer")
    require_encodes(path, tokenizer)
    return tokenizer


def require_encodes(path: str, tokenizer: Any) -> None:
    """Raise FieldError for a tokenizer that fails for an ordinary text, or makes it many times longer."""
    try:
        with panics_are_errors():
            count = max(len(tokenizer(text)["input_ids"]) for text in ("", PROBE))
    except Exception as error:  # of any kind
        raise unreadable_model(path, "has a tokenizer that fails for an ordinary text", error) from error
    bound = f"has a tokenizer that makes {count:,} tokens of {len(PROBE)} characters"
    require(count <= MOST_TOKENS * len(PROBE), "model.path", path, bound, remedy="repair its tokenizer.json")


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Within the block, a panic in Rust, which is no Exception, raises ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"it panics: {error}") from error


def refuse_not_finite(path: str, bad: list[str]) -> None:
    """Raise FieldError for a model if any weights are `bad`: not finite."""
    if bad:
        reason = f"holds NaN or infinity in {len(bad)} of the model's weights, {bad[0]} among them"
        raise FieldError("model.path", path, reason, remedy="download the folder again, or use another checkpoint")


def read_pretrained(reader: Any, path: str, revision: str | None, problem: str, **more: Any) -> Any:
    """What `reader.from_pretrained` gives for a model's path.

    Raises:
        FieldError: it can't be read; `problem` says what that is of the model.
    """
    place = Path(path).expanduser()
    if place.suffix == ".gguf":
        folder = str(place.parent)
        more = {"gguf_file": place.name} | more
    else:
        folder = str(place) if path.startswith("~") else path
    try:
        with panics_are_errors():
            return reader.from_pretrained(folder, revision=revision, trust_remote_code=False, **more)
    except Exception as error:  # damaged files raise all kinds of errors
        raise unreadable_model(path, problem, error) from error


def unreadable_model(path: str, what: str, error: Exception) -> FieldError:
    """The error for a model that Hugging Face can't read; a model's own code is never run."""
    if "trust_remote_code" in str(error):
        remedy = "use a model whose architecture is in transformers"
        return FieldError("model.path", path, "needs custom Python code, which proxima does not run", remedy=remedy)
    said = abbreviated(" ".join(str(error).split()), LONGEST_REASON) or type(error).__name__
    return FieldError("model.path", path, f"{what}: {said}")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Suppress transformers' progress bars and advice within the block: they would break the lines of a run."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
