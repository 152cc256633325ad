"""A Llama shape of a few million random weights over single characters: what `make evidence-model` trains."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evidence.tasks import LABELS

END = "<end>"
CHARACTERS = "\n0123456789=+-*;,>" + LABELS


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the tasks; pad = eos = `<end>`, id 0."""
    vocabulary = {token: index for index, token in enumerate((END, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def random_llama(
    words: PreTrainedTokenizerFast, *, hidden: int, layers: int, positions: int, tied: bool, seed: int
) -> LlamaForCausalLM:
    """Return a Llama of this shape over a tokenizer's words, with random weights; torch's generators stay as they
    were."""
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_start_model(folder: Path, *, hidden: int = 128, layers: int = 5, seed: int = 1) -> Path:
    """Write the model with random weights and its tokenizer as a Hugging Face folder."""
    words = tokenizer()
    model = random_llama(words, hidden=hidden, layers=layers, positions=1024, tied=True, seed=seed)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
