"""Models of a few thousand weights that say little else than answers, right or wrong, and questions for them: every
reward has something to tell apart, every group is mixed now and then, and no training is needed for it.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from proxima.model.load import save
from proxima.model.scalar_model import load_scalar_model
from tests.prepare.published import write_jsonl, write_parquet
from tests.tiny import CHAT_TEMPLATE, END, SPECIAL, START
from tests.tiny import _config as tiny_config

UNKNOWN = "?"
FORMS = ("{}", "\\boxed{{{}}}", "<think>x</think>\n<answer>{}</answer>")
WORDS = (" ", *(form.format(answer) for form in FORMS for answer in "12"))
VOCABULARY = (*SPECIAL, UNKNOWN, *WORDS)
CONTEXT = 512
# In a model's name → what it is built like; "classic" is of a later stage of the small models.
KINDS = {"qwen2.5": "qwen2", "a3b": "qwen3_moe", "qwen3": "qwen3", "smollm2": "llama", "classic": "llama"}


def talker(path: str, root: Path) -> Path:
    """The folder, below `root`, of a tiny model of the architecture that the model of this name has."""
    kind = next(kind for word, kind in KINDS.items() if word in path.lower())
    folder = root / kind
    if not folder.exists():
        logging.disable_progress_bar()
        cls, config = tiny_config(kind)
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
        (worked := folder / "gsm8k").mkdir(parents=True)
        for side, count in (("train", 64), ("test", 6)):
            pairs = [(f"{side} {i}", str(1 + i % 2)) for i in range(count)]
            asked = [{"question": text, "answer": answer} for text, answer in pairs]
            chats = [[{"role": "user", "content": f"Q {text}"}] for text, _ in pairs]
            given = [row | {"messages": chat} for row, chat in zip(asked, chats, strict=True)]
            write_parquet(folder / f"{side}.parquet", given)
            write_parquet(worked / f"{side}.parquet", [row | {"answer": f"so\n#### {row['answer']}"} for row in asked])
            write_jsonl(folder / f"{side}.jsonl", [row | {"gold": row["answer"], "difficulty": 1} for row in asked])
        preferred = [{"question": f"Q {i}", "chosen": str(1 + i % 2), "rejected": str(2 - i % 2)} for i in range(8)]
        write_jsonl(folder / "pairs.jsonl", preferred)
    train = folder / "train.parquet"
    lines = {"pairs": folder / "pairs.jsonl", "jsonl": folder / "train.jsonl"}
    return lines | {"prepared": folder, "parquet": train, "arithmetic": train, "gsm8k": folder / "gsm8k"}
