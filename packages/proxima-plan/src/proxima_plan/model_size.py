"""The size of a model, counted from its config.json, or as published if that is neither cached nor reachable."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from proxima.config.schema import RunConfig
from proxima.config.sections.critic import ModelCritic
from proxima.data import UserError
from proxima.model.adapters.lora import Lora, adapter_parameters
from proxima.model.pretrained import load_config, load_shape

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class ModelFacts:
    """A model's size.

    Args:
        parameters: number of weights, tied ones once.
        layers, hidden, intermediate, vocabulary: as in config.json.
        kv_width: elements of one layer's keys of one token: key-value heads × head size.
        query_width: elements of one layer's queries of one token.
        layer: weights of a decoder layer.
        normed: queries and keys have a norm each.
        experts: experts per token in a layer with experts; `intermediate` is the sum over these.
        adapter: number of an adapter's weights; None: without `model.lora`, or not counted.
        all_experts: of a layer with experts. active: weights that one token uses; 0: all.
        heads, kv_heads: of queries, and of keys and values.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    query_width: int
    layer: int
    heads: int
    kv_heads: int
    normed: bool = False
    experts: int = 0
    all_experts: int = 0
    active: int = 0
    adapter: int | None = None

    @property
    def all_of_experts(self) -> int:
        """The number of weights of all experts."""
        if self.active:
            return round((self.parameters - self.active) / (1 - self.experts / self.all_experts))
        return 0

    @property
    def tensors(self) -> int:
        """The number of weights by name, of each expert its own."""
        attention = 4 + 2 * self.normed
        after = 1 + 3 * self.all_experts if self.all_experts else 3
        return self.layers * (2 + attention + after) + 3

    @property
    def key_elements(self) -> int:
        """Elements of the keys and values of a token, in all layers."""
        return 2 * self.layers * self.kv_width

    def config(self) -> Any:
        """Build a `transformers` config whose layers can be split as those of the model can."""
        if self.all_experts:
            kind = "qwen3_moe"
        elif self.normed:
            kind = "qwen3"
        else:
            kind = "llama"
        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.query_width // self.heads,
            "vocab_size": self.vocabulary,
        }
        if self.all_experts:
            sizes["num_experts"] = self.all_experts
        return AutoConfig.for_model(kind, **sizes)


@cache
def known_models() -> dict[str, ModelFacts]:
    """Return the models of `model_size.toml` by name: that of the hub without its owner, in lower case."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["models"]
    facts = {}
    for table in tables:
        for name in table.pop("names"):
            facts[name] = ModelFacts(**table)
    return facts


def known_facts(path: str) -> ModelFacts | None:
    """The size of a model by the last part of its hub name or path, ignoring case; None if it is not listed."""
    return known_models().get(path.rstrip("/").rpartition("/")[2].lower())


def model_facts(path: str, revision: str | None = None, lora: Lora | None = None) -> ModelFacts:
    """Read config.json and build the model without weights (on the meta device) to count its parameters exactly.

    Raises:
        UserError: the model can't be found, its architecture is unknown, or it lacks the layers of an adapter.
    """
    model = load_shape(path, revision)
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_weights)
    experts = getattr(text, "num_experts_per_tok", None) or 0
    of_experts = experts * (getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0) or 0)
    everything = _weights(model)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    count = 0
    if routed:
        count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    active = 0
    if count:
        active = everything - routed + routed * experts // count
    adapter = None if lora is None else adapter_parameters(model, lora)
    return ModelFacts(
        parameters=everything,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=of_experts or getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        kv_width=key_heads * head_size,
        query_width=heads * head_size,
        layer=_weights(layers) // text.num_hidden_layers,
        heads=heads,
        kv_heads=key_heads,
        normed=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        experts=experts,
        all_experts=count,
        active=active,
        adapter=adapter,
    )


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def critic_facts(config: RunConfig, model: ModelFacts) -> ModelFacts | None:
    """The size of a critic that is a separate model, including any output layer; None without such a critic."""
    critic = config.critic
    if not isinstance(critic, ModelCritic):
        return None
    if critic.path:
        return model_facts(critic.path, critic.revision)
    return replace(model, adapter=None)


def trained_model(spec: Any) -> tuple[ModelFacts, Any]:
    """Return the size of the model of a `model` section and its `transformers` config, None if that can't be read and
    the size is the published one.

    Raises:
        UserError: the size is not known, or the model has layers without attention, whose cache and cost are others.
    """
    try:
        facts = model_facts(spec.path, spec.revision, spec.lora)
        config = load_config(spec.path, spec.revision)
    except (ValueError, OSError, ImportError, AttributeError) as error:
        known = known_facts(spec.path)
        if known is not None:
            return known, None
        reason = " ".join(str(error).split())
        raise UserError(f"no plan: the size of {spec.path} is not known: {reason}") from error
    text = config.get_text_config()
    other = sorted({*(getattr(text, "layer_types", None) or ())} - ATTENTION)
    if other or not getattr(text, "num_attention_heads", None):
        if other:
            layers = f"with layers of {', '.join(other)}"
        else:
            layers = "without attention"
        raise UserError(
            f"no plan for {text.model_type}, {layers}", remedy="plan a decoder with attention in every layer"
        )
    return facts, config
