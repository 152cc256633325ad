"""Folders and GGUF files: written so that Hugging Face reads the same bits back, refused in one line when they are no
model."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxima.data import FieldError
from proxima.engine.local.decoder import packs_bfloat16
from proxima.model.load import ALIGNMENT, load, save
from proxima.model.policy import Policy
from proxima.model.pretrained import check_path, load_config, load_shape, load_tokenizer
from tests.model.folders import edited
from tests.model.rows import loaded, policy, rows
from tests.tiny import CONTEXT, KINDS, tiny
from tests.warm import run_warm


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_policy_is_a_hugging_face_model_bit_for_bit(kind, tmp_path):
    runner = policy(kind)
    with torch.no_grad():
        for p in runner.model.parameters():
            p.add_(0.01 * torch.sin(torch.arange(p.numel()).view(p.shape)))
    folder = save(runner.model, runner.loaded.tokenizer, tmp_path / "a" / "b")
    assert runner.model.config._attn_implementation == "proxima_packed", "saving must not change the running model"
    back = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert back.dtype == torch.float32 and type(back) is type(runner.model)
    for (name, mine), (other, theirs) in zip(runner.model.named_parameters(), back.named_parameters(), strict=True):
        assert name == other and torch.equal(mine, theirs), name
    assert "proxima" not in (folder / "config.json").read_text()
    assert back.config._attn_implementation == "sdpa"
    assert AutoTokenizer.from_pretrained(folder).encode("12 + 3 = 15") == runner.loaded.tokenizer.encode("12 + 3 = 15")


@pytest.mark.parametrize("kind", KINDS)
def test_load_from_a_folder(kind, tiny_model):
    folder = tiny_model(kind)
    loaded = load(str(folder), device="cpu")
    assert loaded.name == f"{kind}-0" and loaded.max_length == CONTEXT and loaded.stop_tokens == (0,)
    assert not loaded.model.training and loaded.model.dtype == torch.float32
    assert loaded.parameters == sum(p.numel() for p in tiny(kind).parameters())
    for mine, theirs in zip(loaded.model.parameters(), tiny(kind).parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert load(str(folder), dtype=torch.bfloat16, device="cpu").model.dtype == torch.bfloat16
    assert load_config(str(folder)).vocab_size == 259 and load_tokenizer(str(folder)).eos_token_id == 0


def test_stop_tokens_are_those_of_all_three_places(tiny_model):
    loaded = load(str(tiny_model("llama")), device="cpu")
    loaded.model.generation_config.eos_token_id = [7, 0]
    loaded.model.config.eos_token_id = 9
    assert loaded.stop_tokens == (7, 0, 9)
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    assert loaded.stop_tokens == (0,)


def test_paths_that_are_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    cases = {
        str(tmp_path / "nowhere"): "does not exist",
        "./nowhere": "does not exist",
        "nowhere": "does not exist",
        "a/b/c": "does not exist",
        str(tmp_path / "empty"): "is a folder without config.json",
        str(tmp_path / "weights.bin"): "is a file but not .gguf",
    }
    for path, said in cases.items():
        for function in (check_path, load, load_config, load_tokenizer):
            with pytest.raises(ValueError) as caught:
                function(path)
            assert str(caught.value).startswith(f"model.path={path!r} {said}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "read", "said"),
    [
        ("model.safetensors", None, load, "can't be loaded"),
        ("model.safetensors", b"", load, "has model.safetensors, which is no whole safetensors file"),
        (
            "model.safetensors",
            b"\x10\x00\x00\x00\x00\x00\x00\x00{torn",
            load,
            "has model.safetensors, which is no whole",
        ),
        ("config.json", {"intermediate_size": 48}, load, "can't be loaded"),
        ("config.json", b"{", load_config, "can't be read"),
        ("config.json", {"model_type": "no_such_model"}, load_config, "can't be read"),
        ("tokenizer.json", b"{", load_tokenizer, "has no usable tokenizer"),
    ],
)
def test_a_damaged_folder_is_one_line(name, content, read, said, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=f"model.path=.* {said}") as caught:
        read(edited(tiny_model("llama"), tmp_path / "m", content, name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_weights_are_never_drawn_at_random(lost, tiny_model, tmp_path):
    tensors = load_file(tiny_model("qwen2") / "model.safetensors")
    del tensors[lost]
    folder = edited(tiny_model("qwen2"), tmp_path / "m", save_bytes(tensors, {"format": "pt"}), "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks 1 of the model's weights, {lost} among them"):
        load(folder, device="cpu")


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs as llama.cpp lays them: neighbours instead of halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> None:
    """The tiny llama as llama.cpp would write it, float32, with its byte tokenizer."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = tiny("llama")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "rope_dimension_count": config.hidden_size // config.num_attention_heads,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    tokenizer = loaded("llama").tokenizer
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_scores([0.0] * len(tokens))  # an empty list of merges is left out, and then scores are looked for
    writer.add_chat_template(tokenizer.chat_template)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "o_proj": "attn_output"}
    names |= {f"{name}_proj": f"attn_{name}" for name in "qkv"}
    names |= {f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.named_parameters():
        parts = name.split(".")
        value = _permuted(value, heads[parts[-2]]) if parts[-2] in heads else value
        block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        writer.add_tensor(f"{block}{names[parts[-2]]}.weight", value.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_load_from_gguf_and_save_as_a_folder(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    from_gguf = load(str(tmp_path / "tiny.gguf"), device="cpu")
    assert from_gguf.name == "tiny.gguf" and from_gguf.model.dtype == torch.float32
    original = tiny("llama")
    theirs = dict(from_gguf.model.named_parameters())
    for name, value in original.named_parameters():
        assert torch.equal(value, theirs[name]), name
    trajectories = rows((5, (4, 2)))
    with torch.no_grad():
        ours = policy("llama")
        a, b = ours(ours.pack(trajectories)).log_prob, (p := Policy(from_gguf))(p.pack(trajectories)).log_prob
    assert torch.equal(a, b)
    save(from_gguf.model, from_gguf.tokenizer, tmp_path / "folder")
    again = load(str(tmp_path / "folder"), device="cpu")
    for name, value in again.model.named_parameters():
        assert torch.equal(value, theirs[name]), name
    chat = [{"role": "user", "content": "2 + 2"}]
    tokenizers = loaded("llama").tokenizer, from_gguf.tokenizer, again.tokenizer
    plain, *read = (t.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for t in tokenizers)
    assert read == [plain, plain]


def test_a_file_that_only_says_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF but no")
    with pytest.raises(ValueError, match=r"model.path=.*x.gguf"):
        load(str(tmp_path / "x.gguf"), device="cpu")


@pytest.mark.parametrize("padding", range(0, 64, 24))
def test_weights_are_aligned_however_long_the_header_of_their_file_is(padding, tiny_model, tmp_path):
    """The same weights compute the same bits, read from a checkpoint or not; some CPUs' kernels go by the address."""
    tensors, name = load_file(tiny_model("llama") / "model.safetensors"), "model.safetensors"
    content = save_bytes(tensors, {"format": "pt", "padding": "x" * padding})
    folder = edited(tiny_model("llama"), tmp_path / "model", content, name)
    raw = AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder, device="cpu").model
    assert not any(p.data_ptr() % ALIGNMENT for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), raw.parameters(), strict=True))


@pytest.mark.parametrize("read", [load_config, load_tokenizer, load])
def test_a_models_own_code_is_never_run(read, tiny_model, tmp_path, monkeypatch):
    """Also where somebody would answer `y` to Hugging Face's question."""
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    folder = Path(edited(tiny_model("llama"), tmp_path / "model", {"model_type": "own", "auto_map": auto}))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        "class Own(PretrainedConfig):\n    model_type = 'own'\nclass OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    words = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OwnTokenizer"}
    words["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(FieldError, match="needs custom Python code, which proxima does not run"):
        read(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [load_config, load_shape, load])
def test_code_of_the_hub_that_a_config_names_is_never_run(read, tiny_model, tmp_path):
    """transformers would download the kernel, where the package `kernels` is installed."""
    folder = edited(tiny_model("llama"), tmp_path / "model", {"attn_implementation": "somebody/kernel"})
    with pytest.raises(FieldError, match="names code of the hub for its attention, somebody/kernel"):
        read(folder)


def test_a_tilde_is_the_home_folder(tiny_model, monkeypatch):
    folder = tiny_model("llama")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_config(f"~/{folder.name}").model_type == "llama"
    assert load(f"~/{folder.name}").parameters == load(str(folder)).parameters


SHAPES_AFTER_SHAPES = """
import ctypes, torch
from proxima.model.load import bound_product_caches
bound_product_caches()
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = type("Heap", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
weight = torch.ones(1536, 576, dtype=torch.bfloat16)
for rows in range(300, 521):
    torch.nn.functional.linear(torch.ones(rows, 576, dtype=torch.bfloat16), weight)
    if rows in (440, 520):
        print(libc.mallinfo2().uordblks >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc what is in use")
@pytest.mark.skipif(not packs_bfloat16(), reason="oneDNN has no such products on this CPU, and keeps none")
def test_shapes_of_products_fill_no_memory():
    """Each would take half a megabyte in two caches of 1,024: a run of fifty steps held twice what it needs."""
    code, out, err = run_warm([sys.executable, "-c", SHAPES_AFTER_SHAPES])
    assert code == 0, err
    before, after = map(int, out.split())
    assert after - before < 20
