"""Random models of a few thousand weights that are shown images, with their processors, and images to show; see
`tests.tiny`.

`gemma3` has patches that attend to each other, and a sliding window; `smolvlm` and `idefics3` cut an image into tiles,
with tokens of text between them; the three of Qwen have positions of three axes, and `qwen3_vl` adds features to the
first layers too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken

from tests.tiny import DECODER, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PLACE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILES = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
GRID = tuple(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3))
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
FAMILIES = ("gemma3", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def make_tiny_reader(kind: str, folder: Path) -> Path:
    """Create a random model of a family, with tokenizer and processor."""
    tokenizer = tiny_tokenizer()
    own = {"idefics3": (*TILES, *GRID), "smolvlm": (*TILES, *GRID), "gemma3": GEMMA}.get(kind, QWEN)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t, special=True) for t in own]})
    ids = dict(zip(own, tokenizer.convert_tokens_to_ids(list(own)), strict=True))
    text = DECODER | {"vocab_size": len(tokenizer) + 5}
    torch.manual_seed(0)
    if kind == "gemma3":
        place, model, processor = _gemma(text, ids)
    elif kind in ("idefics3", "smolvlm"):
        place, model, processor = _tiled(kind, text, ids, tokenizer)
    else:
        place, model, processor = _qwen(kind, text, ids, tokenizer)
    template = TEMPLATE.replace("PLACE", place)
    tokenizer.chat_template = processor.chat_template = template
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tiled(kind: str, text: dict[str, Any], ids: dict[str, int], tokenizer: Any) -> tuple[str, Any, Any]:
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "initializer_range": 0.25,
    }  # fmt: skip
    config = getattr(hf, f"{name}Config")(
        vision_config=vision, text_config=text | {"model_type": "llama"}, scale_factor=2, image_token_id=ids["<image>"],
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    images = getattr(hf, f"{name}ImageProcessorPil")(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4) if kind == "idefics3" else images
    return "<image>", getattr(hf, f"{name}ForConditionalGeneration")(config), processor


def _gemma(text: dict[str, Any], ids: dict[str, int]) -> tuple[str, Any, Any]:
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    text |= {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"], image_token_index=ids["<image_soft_token>"], tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, 0, 0.25)
    images = hf.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return "<start_of_image>", model, images


def _qwen(kind: str, text: dict[str, Any], ids: dict[str, int], tokenizer: Any) -> tuple[str, Any, Any]:
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "window_size": 16}
        vision |= {"fullatt_block_indexes": [1]}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_position_embeddings": 16}
        vision |= {"deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 8}
    config = getattr(hf, f"{name}Config")(
        vision_config=vision | {"initializer_range": 0.25}, text_config=text | {"rope_parameters": rope},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], tie_word_embeddings=False,
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    images = hf.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 16 * 64}, temporal_patch_size=2
    )
    return "<|vision_start|><|image_pad|><|vision_end|>", getattr(hf, f"{name}ForConditionalGeneration")(config), images


def picture(seed: int, width: int, height: int) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8), "RGB")
