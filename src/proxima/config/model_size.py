"""How large a model is: counted from its config.json, or as published, where that is neither cached nor reachable.

`tests/recipes/test_memory.py` builds each known one from its shape and counts. To add one: a line here, and its shape
there.
"""

from dataclasses import dataclass, replace
from typing import Any

from proxima.config.schema import RunConfig
from proxima.config.sections.critic_section import ModelCritic
from proxima.model.load import load_shape
from proxima.model.lora import Lora
from proxima.model.lora_layers import adapter_parameters


@dataclass(frozen=True)
class ModelFacts:
    """A model's size.

    Args:
        parameters: number of weights, tied ones once.
        layers, hidden, intermediate, vocabulary: as in config.json.
        kv_width: elements of one layer's keys of one token: key-value heads × head size.
        adapter: number of an adapter's weights; None: without `model.lora`, or not counted.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    adapter: int | None = None


# hub name without its owner, small letters → facts; the last is key-value heads × head size
KNOWN: dict[str, ModelFacts] = {
    "qwen2.5-1.5b-instruct": ModelFacts(1_543_714_304, 28, 1536, 8960, 151_936, 2 * 128),
    "qwen2.5-32b": ModelFacts(32_763_876_352, 64, 5120, 27_648, 152_064, 8 * 128),
    "qwen2.5-7b": ModelFacts(7_615_616_512, 28, 3584, 18_944, 152_064, 4 * 128),
    "qwen2.5-7b-instruct": ModelFacts(7_615_616_512, 28, 3584, 18_944, 152_064, 4 * 128),
    "qwen3-30b-a3b": ModelFacts(30_532_122_624, 48, 2048, 6144, 151_936, 4 * 128),
    "qwen3-30b-a3b-base": ModelFacts(30_532_122_624, 48, 2048, 6144, 151_936, 4 * 128),
    "qwen3-4b": ModelFacts(4_022_468_096, 36, 2560, 9728, 151_936, 8 * 128),
    "qwen3-4b-base": ModelFacts(4_022_468_096, 36, 2560, 9728, 151_936, 8 * 128),
    "smollm2-135m": ModelFacts(134_515_008, 30, 576, 1536, 49_152, 3 * 64),
    "smollm2-135m-instruct": ModelFacts(134_515_008, 30, 576, 1536, 49_152, 3 * 64),
}


def known_facts(path: str) -> ModelFacts | None:
    """The size of a model by the last part of its hub name or path, whatever its capitals; None for others."""
    return KNOWN.get(path.rstrip("/").rpartition("/")[2].lower())


def model_facts(path: str, revision: str | None = None, lora: Lora | None = None) -> ModelFacts:
    """Read config.json and build the model without weights (on the meta device), which counts its parameters exactly.
    UserError if the model can't be found, its architecture is not known, or it lacks the layers of an adapter."""
    model = load_shape(path, revision)
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        adapter=None if lora is None else adapter_parameters(model, lora),
    )


def critic_facts(config: RunConfig, model: ModelFacts) -> ModelFacts | None:
    """The size of a critic with weights of its own, those of an output layer included if it has one; None without."""
    critic = config.critic
    if not isinstance(critic, ModelCritic):
        return None
    return model_facts(critic.path, critic.revision) if critic.path else replace(model, adapter=None)
