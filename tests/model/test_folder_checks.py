"""The files of a model folder: a value that no model has is refused in one line, by file and key, in every command."""

import json

import pytest

from proxima.cli.main import main
from proxima.data import FieldError
from proxima.model.adapters.lora import Lora
from proxima.model.files import check_model_files
from proxima.model.pretrained import load_config, load_generation_config, load_tokenizer
from tests.model.folders import edited

WRONG = [
    ("config.json", {"eos_token_id": "</s>"}, "eos_token_id='</s>', which must be a token id, or a list of them"),
    ("config.json", {"eos_token_id": {"a": 1}}, "eos_token_id={'a': 1}, which must be a token id, or a list"),
    ("config.json", {"eos_token_id": [[1, 2]]}, "eos_token_id=[[1, 2]], which must be a token id, or a list"),
    ("config.json", {"bos_token_id": 2**40}, "bos_token_id=1099511627776, which must be a whole number in [-1, 2,147"),
    ("config.json", {"architectures": [3]}, "architectures=[3], which must be a list of texts"),
    ("config.json", {"architectures": "Llama"}, "architectures='Llama', which must be a list of texts"),
    ("config.json", {"num_hidden_layers": 0}, "num_hidden_layers=0, which must be a whole number in [1, 10,000]"),
    ("config.json", {"num_hidden_layers": -1}, "num_hidden_layers=-1, which must be a whole number"),
    ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, which must be a whole number"),
    ("config.json", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0, which must be a whole number"),
    ("config.json", {"auto_map": None}, "auto_map=None, which must be an object"),
    ("config.json", {"hidden_size": True}, "hidden_size=True, which must be a whole number"),
    ("config.json", {"vocab_size": 10**300}, "vocab_size=100000"),
    ("config.json", b'{"vocab_size": 1' + b"0" * 400 + b"}", "can't be read: an integer of 401 digits"),
    ("config.json", {"text_config": {"num_attention_heads": 0}}, "text_config.num_attention_heads=0, which must be"),
    ("config.json", {"max_position_embeddings": "x"}, "max_position_embeddings='x', which must be"),
    ("generation_config.json", {"eos_token_id": [0, "x"]}, "eos_token_id=[0, 'x'], which must be a token id"),
    ("generation_config.json", {"temperature": "hot"}, "temperature='hot', which must be a number"),
    ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length='x', which must be a number > 0"),
    ("tokenizer_config.json", {"chat_template": 3}, "chat_template=3, which must be a text, or a list of objects"),
    ("tokenizer_config.json", {"chat_template": [{"name": 3}]}, "chat_template=[{'name': 3}], which must be"),
    ("tokenizer_config.json", {"eos_token": ["x"]}, "eos_token=['x'], which must be a text, or an object"),
    ("config.json", b"[]", "has a config.json that is not a JSON object"),
    ("config.json", b"{", "has a config.json that can't be read: Expecting property name"),
    ("config.json", b"\xff", "has a config.json that can't be read: 'utf-8' codec can't decode byte 0xff"),
    ("tokenizer_config.json", b"[" * 100_000, "has a tokenizer_config.json that can't be read: "),
]


@pytest.mark.parametrize(
    ("file", "change", "expected"), WRONG, ids=[f"{file} {given!r:.40}" for file, given, _ in WRONG]
)
def test_a_value_that_no_model_has(file, change, expected, tiny_model, tmp_path):
    if isinstance(change, dict):
        change = json.dumps(json.loads((tiny_model("llama") / file).read_text()) | change).encode()
    folder = edited(tiny_model("llama"), tmp_path / "m", change, file)
    with pytest.raises(FieldError) as raised:
        check_model_files(folder, tmp_path / "m")
    assert expected in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"model.path='{folder}' has ") and raised.value.remedy


@pytest.mark.parametrize("argv", [["generate", "M", "Hi"], ["explain", "quickstart", "model.path=M"]])
def test_commands_refuse_it_in_one_line(argv, tiny_model, tmp_path, capsys):
    folder = edited(tiny_model("llama"), tmp_path / "m", {"num_hidden_layers": 10**9})
    assert main([word.replace("M", folder) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.count("has config.json with num_hidden_layers=1000000000") == said.count("\n") == 1


def tokenizer_with(tiny_model, tmp_path, **parts) -> str:
    return edited(tiny_model("llama"), tmp_path / "m", parts, "tokenizer.json")


def test_a_tokenizer_that_panics_is_refused(tiny_model, tmp_path):
    """The library's panic is no Exception of Python's."""
    folder = tokenizer_with(
        tiny_model, tmp_path, normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    )
    with pytest.raises(FieldError, match="has a tokenizer that fails for an ordinary text: it panics: "):
        load_tokenizer(folder)


def test_a_tokenizer_that_multiplies_is_refused(tiny_model, tmp_path):
    folder = tokenizer_with(tiny_model, tmp_path, normalizer={"type": "Prepend", "prepend": "x" * 100_000})
    with pytest.raises(FieldError, match=r"makes 100,\d+ tokens of \d+ characters; repair its tokenizer.json"):
        load_tokenizer(folder)


def test_the_generation_config_is_refused_like_the_others(tiny_model, tmp_path):
    folder = edited(tiny_model("llama"), tmp_path / "m", b'{"cache_implementation": [1]}', "generation_config.json")
    with pytest.raises(FieldError, match="has an unusable generation_config.json: "):
        load_generation_config(folder)


@pytest.mark.parametrize("rank", [0, 1 << 17, 2**64])
def test_a_rank_that_no_adapter_has(rank):
    with pytest.raises(FieldError, match=f"rank={rank} must be in "):
        Lora(rank=rank)


def test_a_part_that_a_family_does_not_have(tiny_model, tmp_path):
    """transformers leaves it a dict, and takes it for the config of the text."""
    change = json.dumps(
        json.loads((tiny_model("llama") / "config.json").read_text()) | {"text_config": {"vocab_size": 3}}
    )
    folder = edited(tiny_model("llama"), tmp_path / "m", change.encode(), "config.json")
    with pytest.raises(FieldError, match="such as text_config, which a llama does not have"):
        load_config(str(folder))
