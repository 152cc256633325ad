"""Random models of a few thousand weights with a real tokenizer and chat template, made offline: what most tests run
on.

    folder = make_tiny("llama", tmp_path)           # a Hugging Face folder
    def test_x(tiny_model): folder = tiny_model("qwen2")        # the same, made once a session

The kinds differ where decoders differ: `llama` ties its embeddings and groups its heads 4/2, `qwen2` has biases on q, k
and v and an output layer of its own, `qwen3` normalises q and k and has a head_dim that is not hidden/heads,
`qwen3_moe` has two of eight experts a token in the place of its MLP, `gpt2` has learned positions, LayerNorm and fused
QKV, and no fast path anywhere. Weights are drawn wide, and norms and biases too, so that a forgotten one shows in the
logits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = (END, START, "<|endoftext|>")  # the last because Qwen2 and GPT-2 tokenizers insist on having it
VOCABULARY = 256 + len(SPECIAL)
CONTEXT = 256


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text survives encoding and decoding; pad = eos = `<|im_end|>`, id 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


IDS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
DECODER: dict[str, Any] = IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
GPT2 = IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def _config(kind: str) -> tuple[type[PreTrainedModel], Any]:
    match kind:
        case "llama":
            return LlamaForCausalLM, LlamaConfig(**DECODER, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2ForCausalLM, Qwen2Config(**DECODER, tie_word_embeddings=False)
        case "qwen3":
            return Qwen3ForCausalLM, Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True)
        case "qwen3_moe":
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
            return Qwen3MoeForCausalLM, Qwen3MoeConfig(**DECODER, **experts, head_dim=16, tie_word_embeddings=False)
        case "gpt2":
            return GPT2LMHeadModel, GPT2Config(**GPT2)
    raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")


KINDS = ("llama", "qwen2", "qwen3", "gpt2")  # those without experts


def drawn(kind: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    """A model in float32, in eval mode, with norms and biases drawn too; the same weights for the same seed, the global
    RNG left as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
        embedding = model.get_input_embeddings().weight
        embedding[0] = 0.25 * torch.randn_like(embedding[0])  # padding starts as zeros, and is end-of-text here
    return model.eval()


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    model = drawn(*_config(kind), seed)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return model


def make_tiny(kind: str, folder: Path, seed: int = 0) -> Path:
    """Save model and tokenizer as a Hugging Face folder and return it."""
    logging.disable_progress_bar()  # its bars would stand in the captured output of whichever test comes first
    tiny(kind, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_factory(root: Path) -> Callable[..., Path]:
    """`factory(kind, seed=0)`: the folder of that model below `root`, made at the first call."""

    def factory(kind: str = "llama", seed: int = 0) -> Path:
        folder = root / f"{kind}-{seed}"
        return folder if folder.exists() else make_tiny(kind, folder, seed)

    return factory
