"""Make a small model that is shown images and counts squares badly: `make vision-model` → models/vision.

    python scripts/vision_model.py [FOLDER]

The shape is that of Qwen2-VL: a vision tower of two layers over patches of 4 pixels, merged to one token for 8 pixels,
and a decoder of three layers over single characters: a million weights. All of them, the tower's too, are trained on
right answers until ENOUGH of the answers sampled to other questions are right; `recipes/cpu/vision.yaml` goes on.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from proxima.model.images.image_store import ImageStore, ImageTokenizer
from proxima.model.pretrained import load_tokenizer
from proxima.task.generated import Shapes
from proxima.task.prompts import to_prompt

ENOUGH, MOST, BATCH, RATE = 0.3, 4000, 64, 1e-3  # share right, steps, images of a step, learning rate
SPECIAL = ("<end>", "<image_start>", "<image_pad>", "<image_end>", "<video_pad>")
CHARACTERS = "\n0123456789 ?.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image_start><image_pad><image_end>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    words = hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    words.chat_template = TEMPLATE
    return words


def make_vision_model(folder: Path, *, hidden: int = 128, layers: int = 3, seed: int = 1) -> Path:
    """Write the model, its tokenizer and its image processor as a Hugging Face folder."""
    words = tokenizer()
    ids = dict(zip(SPECIAL, range(len(SPECIAL)), strict=True))
    text = {
        "vocab_size": len(words), "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 32, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "embed_dim": 64, "hidden_size": hidden,
        "mlp_ratio": 2,
    }  # fmt: skip
    config = hf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<image_pad>"], video_token_id=ids["<video_pad>"],
        vision_start_token_id=ids["<image_start>"], vision_end_token_id=ids["<image_end>"], tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = 0
    size = {"shortest_edge": 64, "longest_edge": 1 << 16}
    hf.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    words.save_pretrained(folder)
    model.config.save_pretrained(folder)
    train(model, ImageStore(str(folder)), seed)
    model.save_pretrained(folder)
    return folder


def train(model: Any, store: ImageStore, seed: int) -> None:
    """Train on right answers, until ENOUGH of the sampled ones are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    held_out, right = inputs(store, Shapes(split="test", size=4 * BATCH), seed, 0, 4 * BATCH), 0.0
    training = Shapes(size=MOST * BATCH)
    for step in range(MOST):
        if step % 10 == 0:
            with torch.no_grad():
                shown, answers = held_out
                chances = model(**shown).logits[:, -1].softmax(-1)
                right = float(chances.gather(1, answers[:, None]).mean())
            print(f"step {step}: {right:.3f} of the sampled answers are right", flush=True)
            if right >= ENOUGH:
                return
        shown, answers = inputs(store, training, seed, step * BATCH, BATCH)
        loss = torch.nn.functional.cross_entropy(model(**shown).logits[:, -1], answers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit(f"error: after {MOST} steps {right:.3f} are right, not {ENOUGH}; try another seed")


def inputs(store: ImageStore, task: Shapes, seed: int, first: int, count: int) -> tuple[dict[str, Any], torch.Tensor]:
    """What transformers' model takes for some questions, and the ids of their answers."""
    rows = task.rows(seed)
    asked = [rows[number] for number in range(first, first + count)]
    tokenizer = ImageTokenizer(load_tokenizer(store.model), store)
    prompts = torch.stack([torch.from_numpy(to_prompt(row, 0, tokenizer).tokens) for row in asked])
    pixels = [store.processed(store.add(row.images[0]))[1] for row in asked]
    ids = prompts.where(prompts >= 0, store.config.image_token_id).long()
    shown = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (prompts < 0).int()}
    shown |= {name: torch.cat([of[name] for of in pixels]) for name in ("pixel_values", "image_grid_thw")}
    return shown, torch.tensor([tokenizer.convert_tokens_to_ids(row.answer) for row in asked])


if __name__ == "__main__":
    print(make_vision_model(Path(sys.argv[1] if len(sys.argv) > 1 else "models/vision")))
