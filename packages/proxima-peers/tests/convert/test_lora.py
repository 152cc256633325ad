"""`model.lora` from a script's call of peft; options are in options.yaml."""

import pytest

from proxima.config import resolve
from proxima.model.lora import Lora
from proxima_peers.convert.conversion import convert

from .conftest import names

SCRIPT = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
adapter = LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj"], task_type="CAUSAL_LM", bias={bias!r})
trainer = GRPOTrainer(model="m", args=GRPOConfig(num_generations=4), reward_funcs="x", peft_config=adapter)
"""


@pytest.mark.parametrize("bias", ["none", "all"])
def test_the_adapter_of_a_script(tmp_path, bias):
    (tmp_path / "train.py").write_text(SCRIPT.format(bias=bias))
    done = convert(tmp_path / "train.py", "trl")
    assert resolve(done.recipe).config.model.lora == Lora(rank=16, alpha=64.0, targets=("q_proj",))
    assert ("peft_config.bias" in names(done.unsupported)) is (bias == "all")
    assert "peft_config.task_type" in names(done.ignored)


def test_an_adapter_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(bias="none").replace("adapter = LoraConfig", "adapter = make"))
    done = convert(tmp_path / "train.py", "trl")
    assert "peft_config" in names(done.missing)
