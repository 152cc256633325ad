"""Plans of known models, for the tests."""

from dataclasses import replace
from pathlib import Path

from transformers import Qwen3MoeConfig

from proxima.config.sections.model import ModelConfig
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import read_devices
from proxima_plan.forecast import PlannedRecipe, StepPlan
from proxima_plan.layout import DeviceLayout
from proxima_plan.model_size import known_models
from proxima_plan.step_load import Load

LOAD = Load(sequences=2048, group=32, prompt=150, mean=3050, longest=3946, updates=4)


def planned(model="qwen3-30b-a3b", devices="32xH100-80G", load=LOAD, engines=16, beside=0, each=2, **split) -> StepPlan:
    """A plan of a model on devices, `beside` of them for engines alone."""
    (asked,) = read_devices(devices)
    sharding = Sharding(param_dtype="bfloat16", **split)
    layout = DeviceLayout(asked.count - beside, sharding, engines, each, colocated=not beside)
    spec = ModelConfig(path=model, compute_dtype="bfloat16", gradient_checkpointing=load.checkpointing)
    return PlannedRecipe(known_models()[model], spec, load, asked, None).plan(layout)


def changed(load=LOAD, **fields) -> Load:
    return replace(load, **fields)


def small_mixture(folder: Path) -> str:
    """Write the config.json of a mixture of 1,912 weights; its path."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "intermediate_size": 20}
    Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, tie_word_embeddings=False).save_pretrained(folder)
    return str(folder)
