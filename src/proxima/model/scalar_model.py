"""Scalar models: one number for each state of a decoder, from a linear head without bias. Reward models and critics.

On disk they are what `AutoModelForSequenceClassification` with one label loads.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data import FieldError, require
from proxima.data.columns import Floats
from proxima.data.packed_batch import PackedBatch
from proxima.data.random import VALUE_HEAD, mix, normals
from proxima.data.trajectory import Trajectory
from proxima.model.adapters.adapter_files import load_merged, with_adapter
from proxima.model.adapters.lora import Lora
from proxima.model.architecture import SCALAR_HEAD as HEAD
from proxima.model.architecture import TextConfig, scalar_head
from proxima.model.files import is_adapter
from proxima.model.load import load_weights, on_ranks
from proxima.model.micro_batch import micro_batches
from proxima.model.packed_model import PackedModel, PassSettings, TokenOutputs
from proxima.model.parallel.shard import require_splittable
from proxima.model.parallel.sharding import Sharding, fill_weight, plain_type
from proxima.model.pretrained import LoadedModel, load_config, load_tokenizer

NORMALIZATION = "reward_normalization"  # key of config.json


class ScalarModel(PackedModel):
    """A decoder with a scalar head: a `value` for each response token, of the state that predicts it.

    Args:
        loaded: from `load_scalar_model`.
        settings: of `PackedModel`.
    """

    def __init__(self, loaded: LoadedModel, **settings: Unpack[PassSettings]) -> None:
        super().__init__(loaded, **settings)
        untyped: Any = self.model
        self.backbone = untyped.get_decoder()
        self.head = getattr(untyped, HEAD)

    def values_of(self, hidden: Tensor) -> Tensor:
        return scalar_head(hidden, self.head)

    def __call__(self, batch: PackedBatch, needs: frozenset[str] = frozenset()) -> TokenOutputs:
        """`value` [N], whether or not it is in `needs`; there are no log-probs.

        Raises:
            ValueError: `needs` names something else.
        """
        other = needs - {"value"}
        if other:
            raise ValueError(f"a scalar model gives values alone, not {', '.join(sorted(other))}")
        return TokenOutputs(value=self.values(batch))

    def sequence_scores(self, batch: PackedBatch) -> Tensor:
        """[S] the score of each sequence of a batch, see `last_values`."""
        return last_values(batch, self.values(batch), TextConfig.of(self.model.config).pad)

    @torch.no_grad()
    def scores(self, trajectories: Sequence[Trajectory], tokens_per_forward: int) -> Floats:
        """[S] float32, reward units: the score of each prompt with its response, as `last_values` defines it. A forward
        pass has at most `tokens_per_forward` tokens; neighbours of a group share their prompt."""
        scores = [np.zeros(0, np.float32)]
        rows = [trajectory.with_sentinel() for trajectory in trajectories]
        for cut in micro_batches([(row,) for row in rows], tokens_per_forward, share_prompt=self.share_prompt):
            batch = self.pack([rows[i] for i in cut])
            scores.append(self.sequence_scores(batch).cpu().numpy())
        return np.concatenate(scores)


def last_values(batch: PackedBatch, values: Tensor, pad: int | None) -> Tensor:
    """[S] the score of each sequence as `AutoModelForSequenceClassification` computes it: at the last token that is not
    padding.

    Args:
        batch: of trajectories `with_sentinel`. values: [N] of that batch.
        pad: the padding token of the model's config; None: the last token counts.

    Edge cases: without a response, or if it consists only of padding, the score is that of the prompt. A folder whose
        padding token ends the text (pad = eos) scores the token before it, as Hugging Face does.
    """
    start = batch.cu_seqlens[:-1]
    end = batch.cu_seqlens[1:]
    counted = torch.ones_like(batch.target, dtype=torch.bool) if pad is None else batch.target != pad
    counted.index_fill_(0, end - 1, False)  # the sentinel; an assignment would wait for the device
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
    lora: Lora | None = None,
    sharding: Sharding | None = None,
    max_length: int | None = None,
) -> LoadedModel:
    """Load a scalar model from the folder of one, or put a new head on a causal language model.

    Args:
        path: folder or hub name; for an adapter's folder, its base with the adapter's head, and the adapter merged.
        new_head: standard deviation of the head's weights where the folder has none, 0: zeros; None: the folder must
            have one. A new head also gets a padding token that ends no text, if the tokenizer has one, so that the
            end-of-text token is scored.
        seed: of the random initialisation of a new head and new adapters.
        lora: adapters for the decoder, which are then trained alongside the head.
        sharding, max_length: as `load`.

    Raises:
        FieldError: the path can't be loaded; an adapter does not fit; it has no head, or one with several labels;
            transformers has no sequence-classification class for its architecture, or one whose score is not a linear
            function of the last hidden state.
    """
    from transformers import AutoModelForSequenceClassification

    if sharding is not None:
        require_splittable(path, revision, sharding, adapters=lora is not None)
    whole_on = device if sharding is None else "cpu"
    if is_adapter(path):
        load_base = partial(_load_below, path, max_length=max_length, dtype=dtype, device=whole_on)
        merged = load_merged(path, load_base, scalar=True)
        return on_ranks(merged, sharding, device)
    config, trained = scalar_config(path, revision, new_head=new_head is not None)
    if not trained:
        tokenizer = load_tokenizer(path, revision)
        config.get_text_config().pad_token_id = _neutral_pad(tokenizer, TextConfig.of(config))
    may_lack = () if trained else (f"{HEAD}.weight",)
    loaded, missing = load_weights(
        AutoModelForSequenceClassification,
        path,
        revision=revision,
        dtype=dtype,
        device=whole_on if lora else device,
        may_lack=may_lack,
        sharding=None if lora else sharding,
        max_length=max_length,
        config=config,
    )
    head: Any = getattr(loaded.model, HEAD, None)
    modules = {name for name, _ in loaded.model.named_children()}
    linear = isinstance(head, nn.Linear) and dict(head.named_parameters()).keys() == {"weight"}
    if modules != {loaded.model.base_model_prefix, HEAD} or not linear:
        name = plain_type(loaded.model).__name__
        raise FieldError("model.path", path, f"{name} does not score by one linear layer without bias")
    if missing:
        fill_weight(head.weight, _new_weights(head.in_features, new_head or 0.0, seed))
    if lora is None:
        return on_ranks(loaded, sharding, device)
    if lora.path is not None:
        moments = score_normalization(load_config(lora.path))
        if moments is not None:
            set_score_normalization(loaded.model.config, *moments)
    return on_ranks(with_adapter(loaded, lora, revision=revision, dtype=dtype, seed=seed), sharding, device)


def _load_below(
    adapter: str, path: str, revision: str | None, *, dtype: torch.dtype, device: str, max_length: int | None
) -> LoadedModel:
    """Load the base of a scalar adapter, with the config in the adapter's folder."""
    from transformers import AutoModelForSequenceClassification

    config, _ = scalar_config(adapter)
    loaded, _ = load_weights(
        AutoModelForSequenceClassification,
        path,
        revision=revision,
        dtype=dtype,
        device=device,
        may_lack=(f"{HEAD}.weight",),
        max_length=max_length,
        config=config,
    )
    return loaded


def make_value_head(model: Any, new_head: float = 0.0, seed: int = 0) -> nn.Linear:
    """A scalar head for the trunk of a policy, on its device; arguments as `load_scalar_model`. It is float32 on a
    bfloat16 trunk: in bfloat16 the steps of an optimizer would be lost."""
    size = model.config.get_text_config().hidden_size
    dtype = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(size, 1, bias=False, device=model.device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(_new_weights(size, new_head, seed))
    return head


def scalar_config(path: str, revision: str | None = None, *, new_head: bool = False) -> tuple[Any, bool]:
    """The config of a scalar model, with one label, and whether the folder contains its head; no weights are read.

    Args:
        new_head: the folder may be a language model's.

    Raises:
        FieldError: as `load_scalar_model`, as far as the config tells.
    """
    from transformers import AutoModelForSequenceClassification

    config: Any = load_config(path, revision)
    if path.endswith(".gguf"):
        raise FieldError("model.path", path, "is a GGUF file, which holds no scalar head", remedy="give a folder")
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        reason = f"is a model of type {config.model_type}, for which transformers has no sequence-classification class"
        raise FieldError("model.path", path, reason, remedy="use a decoder such as Llama or Qwen")
    trained = any("SequenceClassification" in name for name in config.architectures or ())
    labels = config.num_labels
    remedy = "use a reward model with one score"
    require(not trained or labels == 1, "model.path", path, f"scores {labels} labels, not one", remedy=remedy)
    remedy = "give the folder of a reward model; `proxima train cpu/reward` makes one"
    require(trained or new_head, "model.path", path, "has no scalar head: it is a language model", remedy=remedy)
    config.num_labels = 1
    return config, trained


def score_normalization(config: Any) -> tuple[float, float] | None:
    """Mean and standard deviation of the scores on the held-out completions of the training, from a model's config;
    None without them."""
    moments = getattr(config, NORMALIZATION, None)
    if moments is None:
        return None
    return (float(moments["mean"]), float(moments["std"]))


def set_score_normalization(config: Any, mean: float, std: float) -> None:
    """Store mean and standard deviation of the held-out scores in the model's config; `save` writes them into
    config.json."""
    setattr(config, NORMALIZATION, {"mean": mean, "std": std})


def _new_weights(size: int, spread: float, seed: int) -> Tensor:
    return torch.from_numpy(normals(size, VALUE_HEAD, mix(seed)) * spread)[None]


def _neutral_pad(tokenizer: Any, config: TextConfig) -> int | None:
    """The config's padding token, or, where that ends texts or is missing, the first special token that does not."""
    ends = config.eos if isinstance(config.eos, list) else [config.eos]
    stop = {tokenizer.eos_token_id, *ends}
    padding = config.pad
    special = (i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special and i not in stop)
    if padding is None or padding in stop:
        return next(special, padding)
    return padding
