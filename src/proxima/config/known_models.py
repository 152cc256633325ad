"""Sizes of the models that the recipes name, for `explain` where their config.json is neither cached nor reachable.

`tests/recipes/test_memory.py` builds each from its shape and counts. To add one: a line here, and its shape there.
"""

from proxima.config.estimate import ModelFacts

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
