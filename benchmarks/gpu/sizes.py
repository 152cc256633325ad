"""Shapes of published models, whose weights are drawn on the device, and the update that is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.side import device
from proxima.data.trajectory import Trajectory
from proxima.model.pretrained import LoadedModel

QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
SHAPES: dict[str, dict[str, Any]] = {  # config.json of Qwen3-1.7B and Qwen3-4B
    "1.7B": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Batch:
    """The sequences of an update: `prompts` groups of `completions` each, all of the same length."""

    prompts: int = 16
    completions: int = 8
    prompt: int = 256
    response: int = 1024

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions

    @property
    def fed(self) -> int:
        """Tokens that are fed to the model, prompts once a group."""
        return self.prompts * self.prompt + self.sequences * self.response

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in one layer."""
        of_prompt = self.prompt * (self.prompt + 1) // 2
        of_response = self.response * self.prompt + self.response * (self.response + 1) // 2
        return self.prompts * of_prompt + self.sequences * of_response

    def trajectories(self, vocabulary: int) -> list[Trajectory]:
        """Random tokens; no advantage is 0."""
        draw = np.random.default_rng(1)
        made = []
        for group in range(self.prompts):
            prompt = draw.integers(3, vocabulary, self.prompt).astype(np.int32)
            for sample in range(self.completions):
                behavior = np.full(self.response, -np.log(vocabulary), np.float32)
                made.append(
                    Trajectory(
                        uid=group,
                        sample=sample,
                        group=group,
                        prompt_tokens=prompt,
                        tokens=draw.integers(3, vocabulary, self.response).astype(np.int32),
                        advantage=(-1.0) ** sample,
                        behavior_log_prob=behavior,
                        proximal_log_prob=behavior,
                    )
                )
        return made


WHOLE, SMALL = Batch(), Batch(prompts=2, completions=4, prompt=8, response=12)


def config_of(shape: str, *, rehearse: bool) -> Any:
    """The `transformers` config of a shape; in a rehearsal a tiny one of the same family."""
    from transformers import Qwen3Config

    settings = TINY if rehearse else SHAPES[shape]
    return Qwen3Config(**settings, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=1)


def module_of(config: Any, place: torch.device | str, dtype: torch.dtype) -> Any:
    """The module of a config, with the weights of its initialisation."""
    from transformers import AutoModelForCausalLM

    with torch.device(place):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def drawn_model(config: Any, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model whose weights are drawn on the device, the same each time, with a tokenizer of as many words as its
    vocabulary; nothing ends a completion."""
    torch.manual_seed(1)
    model = module_of(config, device(), dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return LoadedModel(model=model, tokenizer=word_tokenizer(config.vocab_size), path="drawn")


def word_tokenizer(words: int) -> Any:
    """A tokenizer with so many words and no end of a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")


def shape_folder(config: Any, folder: Path) -> str:
    """Write config.json alone, from which the plan counts."""
    config.save_pretrained(folder)
    return str(folder)
