"""Matrices, experts and vocabulary split over ranks compute what one process computes."""

import pytest
import transformers as hf

from proxima.data import FieldError
from proxima.model import load, save
from proxima.model.lora import Lora
from proxima.model.parallel.refusals import check_split
from proxima.model.parallel.sharding import Sharding
from tests.model.families import make
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.splits import EXPERTS, MODELS, SMALL, on_four, on_two, write_models


@pytest.mark.parametrize("size", [2, 4])
def test_passes_and_updates_are_those_of_one_process(size, tmp_path):
    write_models(tmp_path)
    run_ranks({2: on_two, 4: on_four}[size], size, tmp_path)


@pytest.mark.parametrize(
    "config, ranks, message",
    [
        ({}, 8, "must divide the 4 key and value heads of model.path; set it to 4"),
        ({}, 3, "must divide the 8 attention heads of model.path; set it to 4"),
        ({"intermediate_size": 42}, 4, "must divide the 42 units of intermediate_size of model.path; set it to 2"),
        ({"num_key_value_heads": 8, "num_experts": 6}, 4, "must divide the 6 experts of model.path; set it to 2"),
    ],
)
def test_what_the_ranks_do_not_divide(config, ranks, message):
    kind, sizes = (hf.Qwen3MoeConfig, SMALL | EXPERTS) if "num_experts" in config else (hf.LlamaConfig, SMALL)
    with pytest.raises(FieldError, match=message) as error:
        check_split(kind(**sizes | config), None, Sharding(tensor_parallel=ranks), adapters=False)
    assert error.value.field == "placement.tensor_parallel" and error.value.value == ranks


def test_what_has_no_plan_or_another():
    two, unsplit = Sharding(tensor_parallel=2), Sharding()
    for config, message in (
        (hf.GPT2Config(), "gpt2, of model.path, has none; set it to 1"),
        (hf.Phi3Config(pad_token_id=0), "phi3, of model.path, whose plan has colwise_gather_output"),
    ):
        with pytest.raises(FieldError, match=message):
            check_split(config, None, two, adapters=False)
        check_split(config, None, unsplit, adapters=False)
    with pytest.raises(FieldError, match=r"adapters; set it to 1, or model\.lora to null"):
        check_split(MODELS["llama"][1], None, two, adapters=True)
    both = Sharding(tensor_parallel=2, expert_parallel=2)
    with pytest.raises(FieldError, match="and so does expert_parallel"):
        check_split(MODELS["experts"][1], None, both, adapters=False)
    with pytest.raises(FieldError, match="splits experts, and model.path has none"):
        check_split(MODELS["llama"][1], None, both, adapters=False)


def test_refused_before_a_weight_is_read(tmp_path):
    made = make("GPT-2")
    save(made.model, made.tokenizer, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for lora in (None, Lora()):
        with pytest.raises(FieldError, match="placement.tensor_parallel=2"):
            load(str(tmp_path), device="cpu", lora=lora, sharding=Sharding(tensor_parallel=2))
