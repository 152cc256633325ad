"""Scalar models: one number for each state of a decoder, from a linear head without bias. Reward models and critics.

On disk they are what `AutoModelForSequenceClassification` with one label loads.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from proxima.data import FieldError, PackedBatch
from proxima.data.random import VALUE_HEAD, mix, normals
from proxima.model.load import LoadedModel, load_config, load_tokenizer, load_weights
from proxima.model.packed_model import PackedModel, TokenOutputs, scalar_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD = "score"  # what transformers calls it in every decoder's classification model


class ScalarModel(PackedModel):
    """A decoder with a scalar head: a `value` for each response token, of the state that predicts it.

    Args:
        loaded: of `load_scalar_model`.
        settings: of `PackedModel`.
    """

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        super().__init__(loaded, **settings)
        whole: Any = self.model
        self.backbone, self.head = whole.get_decoder(), getattr(whole, HEAD)

    def values_of(self, hidden: Tensor) -> Tensor:
        return scalar_head(hidden, self.head)

    def __call__(self, batch: PackedBatch, needs: frozenset[str] = frozenset()) -> TokenOutputs:
        """`value` [N], whether or not it is in `needs`; there are no log-probs.

        Raises:
            ValueError: `needs` names something else.
        """
        if other := needs - {"value"}:
            raise ValueError(f"a scalar model gives values alone, not {', '.join(sorted(other))}")
        return TokenOutputs(value=self.values(batch))

    def last_values(self, batch: PackedBatch, values: Tensor) -> Tensor:
        """[S] the score of each sequence as `AutoModelForSequenceClassification` computes it: at the last token that is
        not the padding token of the model's config.

        Args:
            batch: of trajectories `with_sentinel`. values: [N] of that batch.

        Edge cases: without a response, or where it is nothing but padding, the score is that of the prompt. Where the
            config names no padding token, or one that no text ends with, the last token counts. Folders whose padding
            token ends the text (pad = eos) are scored at the token before it, as Hugging Face does.
        """
        start, end = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        counted = torch.ones_like(batch.target, dtype=torch.bool)
        if (pad := pad_token(self.model.config)) is not None:
            counted = batch.target != pad
        counted[end - 1] = False  # the sentinel
        after = torch.where(counted, torch.arange(1, len(counted) + 1, device=counted.device), 0)
        index = torch.arange(len(start), device=start.device)
        sequence = torch.repeat_interleave(index, batch.cu_seqlens.diff(), output_size=len(counted))
        last = torch.zeros_like(start).scatter_reduce(0, sequence, after, "amax")
        return values.index_select(0, torch.maximum(last, start))


def load_scalar_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "auto",
    new_head: float | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a scalar model from the folder of one, or put a new head on a causal language model.

    Args:
        path: folder or hub name.
        new_head: standard deviation of the head's weights where the folder has none, 0: zeros; None: the folder must
            have one. A new head also gets a padding token that ends no text, if the tokenizer has one, so that the
            end-of-text token is scored.
        seed: of the draws of a new head.

    Raises:
        FieldError: the path can't be loaded; it has no head, or one with several labels; transformers has no
            sequence-classification class for its architecture, or one whose score is not a linear function of the last
            hidden state.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_config(path, revision)
    if path.endswith(".gguf"):
        raise FieldError("model.path", path, "is a GGUF file, which holds no scalar head", remedy="give a folder")
    trained = _check_config(path, config, AutoModelForSequenceClassification._model_mapping)
    config.num_labels = 1
    if not trained and new_head is None:
        reason = "has no scalar head: it is a language model"
        raise FieldError(
            "model.path", path, reason, remedy="give the folder of a reward model; `proxima reward` makes one"
        )
    if not trained:
        config.get_text_config().pad_token_id = _neutral_pad(path, revision, config)
    loaded, missing = load_weights(
        AutoModelForSequenceClassification,
        path,
        revision=revision,
        dtype=dtype,
        device=device,
        may_lack=() if trained else (f"{HEAD}.weight",),
        config=config,
    )
    head: Any = getattr(loaded.model, HEAD, None)
    modules = {name for name, _ in loaded.model.named_children()}
    linear = isinstance(head, nn.Linear) and dict(head.named_parameters()).keys() == {"weight"}
    if modules != {loaded.model.base_model_prefix, HEAD} or not linear:
        name = type(loaded.model).__name__
        raise FieldError("model.path", path, f"{name} does not score by one linear layer without bias")
    if missing:
        with torch.no_grad():
            head.weight.copy_(_new_weights(head.in_features, new_head or 0.0, seed))
    return loaded


def make_value_head(model: Any, new_head: float = 0.0, seed: int = 0) -> nn.Linear:
    """A scalar head for the trunk of a policy, on its device and in its dtype; arguments as `load_scalar_model`."""
    size = model.config.get_text_config().hidden_size
    head = nn.Linear(size, 1, bias=False, device=model.device, dtype=model.dtype)
    with torch.no_grad():
        head.weight.copy_(_new_weights(size, new_head, seed))
    return head


def pad_token(config: "PretrainedConfig") -> int | None:
    """The padding token of a model's config."""
    found: int | None = getattr(config.get_text_config(), "pad_token_id", None)
    return found


def _new_weights(size: int, spread: float, seed: int) -> Tensor:
    return torch.from_numpy(normals(size, VALUE_HEAD, mix(seed)) * spread)[None]


def _check_config(path: str, config: Any, classes: Any) -> bool:
    """True when the folder holds a classification model."""
    if type(config) not in classes:
        reason = f"is a model of type {config.model_type}, for which transformers has no sequence-classification class"
        raise FieldError("model.path", path, reason, remedy="use a decoder such as Llama or Qwen")
    trained = any("SequenceClassification" in name for name in config.architectures or ())
    if trained and config.num_labels != 1:
        reason = f"scores {config.num_labels} labels, not one"
        raise FieldError("model.path", path, reason, remedy="use a reward model with one score")
    return trained


def _neutral_pad(path: str, revision: str | None, config: "PretrainedConfig") -> int | None:
    """The config's padding token, or, where that ends texts or is missing, the first special token that does not."""
    tokenizer = load_tokenizer(path, revision)
    ends = getattr(config.get_text_config(), "eos_token_id", None)
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    found = pad_token(config)
    special = (i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special and i not in stop)
    return next(special, found) if found is None or found in stop else found
