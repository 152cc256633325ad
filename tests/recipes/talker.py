"""Models of a few thousand weights that say little else than answers, right or wrong, and questions for them: every
reward has something to tell apart, every group is mixed now and then, and no training is needed for it.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from proxima.model import load_scalar_model, save
from tests.tiny import CHAT_TEMPLATE, END, SPECIAL, START
from tests.tiny import _config as tiny_config

UNKNOWN = "?"
WORDS = (
    " ",
    "1",
    "2",
    "\\boxed{1}",
    "\\boxed{2}",
    "<think>x</think>\n<answer>1</answer>",
    "<think>x</think>\n<answer>2</answer>",
)
VOCABULARY = (*SPECIAL, UNKNOWN, *WORDS)
CONTEXT = 512
KINDS = {
    "qwen2.5": "qwen2",
    "a3b": "qwen3_moe",
    "qwen3": "qwen3",
    "smollm2": "llama",
    "classic": "llama",  # a later stage of the small models
}  # in a model's name → what it is built like


def talker(path: str, root: Path) -> Path:
    """The folder, below `root`, of a tiny model of the architecture that the model of this name has."""
    kind = next(kind for word, kind in KINDS.items() if word in path.lower())
    folder = root / kind
    if not folder.exists():
        logging.disable_progress_bar()
        cls, config = _moe() if kind == "qwen3_moe" else tiny_config(kind)
        config.vocab_size, config.max_position_embeddings = len(VOCABULARY), CONTEXT
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(config)
        with torch.no_grad():
            model.model.norm.weight.mul_(0.2)  # logits close to one another: it says everything in its vocabulary
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    return folder


def scorer(root: Path) -> Path:
    """The folder of a reward model made of the small talker."""
    folder = root / "scorer"
    if not folder.exists():
        loaded = load_scalar_model(str(talker("smollm2", root)), device="cpu", new_head=0.25, seed=1)
        save(loaded.model, loaded.tokenizer, folder)
    return folder


def _moe() -> tuple[Any, Any]:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **heads, **ends, initializer_range=0.25)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, most of them unknown; a whole answer is one token."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN)
    fast.chat_template = CHAT_TEMPLATE
    assert START in fast.all_special_tokens or START in VOCABULARY
    return fast


def questions(root: Path) -> dict[str, Path]:
    """Kind of a task → what its `path` may be; the answers are 1 and 2, of different questions on both sides."""
    folder = root / "questions"
    if not folder.exists():
        folder.mkdir()
        for side, count in (("train", 64), ("test", 6)):
            asked = [f"{side} {i}" for i in range(count)]
            answers = [str(1 + i % 2) for i in range(count)]
            messages = [[{"role": "user", "content": f"Q {text}"}] for text in asked]
            parquet.write_table(
                pyarrow.table({"question": asked, "answer": answers, "messages": messages}), folder / f"{side}.parquet"
            )
            rows = [
                {"question": a, "answer": b, "gold": b, "difficulty": 1} for a, b in zip(asked, answers, strict=True)
            ]
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        worked = folder / "gsm8k"
        worked.mkdir()
        for side in ("train", "test"):
            table = parquet.read_table(folder / f"{side}.parquet").to_pylist()
            rows = {
                "question": [row["question"] for row in table],
                "answer": [f"so\n#### {row['answer']}" for row in table],
            }
            parquet.write_table(pyarrow.table(rows), worked / f"{side}.parquet")
        pairs = [{"question": f"Q {i}", "chosen": str(1 + i % 2), "rejected": str(2 - i % 2)} for i in range(8)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {
        "pairs": folder / "pairs.jsonl",
        "prepared": folder,
        "parquet": folder / "train.parquet",
        "arithmetic": folder / "train.parquet",
        "jsonl": folder / "train.jsonl",
        "gsm8k": folder / "gsm8k",
    }
