"""The shape and the generation config of a model whose weights are not loaded."""

from typing import TYPE_CHECKING, Any

import torch

from proxima.data import UserError
from proxima.model.pretrained import load_config, reader_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def load_generation_config(path: str, revision: str | None = None) -> "GenerationConfig | None":
    """The generation config by the model's authors, with the tokens that end a completion; None without one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:
        return None


def load_shape(path: str, revision: str | None = None) -> "PreTrainedModel":
    """The model without weights (on the meta device), from its config.

    Raises:
        UserError: the config can't be read, or its architecture is not known.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        try:
            config: Any = load_config(path, revision)
            scores = any("SequenceClassification" in name for name in config.architectures or ())
            kind: Any = AutoModelForSequenceClassification if scores else reader_of(config)
            model: PreTrainedModel = kind.from_config(config, trust_remote_code=False)
        except (ValueError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"model.path={path!r}: {str(error).splitlines()[0]}") from error
    return model
