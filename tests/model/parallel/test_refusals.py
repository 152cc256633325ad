"""What can't be split is refused with a remedy that works, by a model's config and shape alone."""

import pytest
import torch
import torch.distributed.fsdp
import transformers as hf

from proxima.data import FieldError, UserError
from proxima.model.adapters.lora import Lora
from proxima.model.load import load
from proxima.model.parallel.context import ContextGroup
from proxima.model.parallel.shard import auxiliary_sharding, check_split, require_splittable
from proxima.model.parallel.sharding import Sharding
from proxima.model.scalar_model import load_scalar_model
from tests.model.families import FAMILIES
from tests.model.parallel.splits import EXPERTS, MODELS, SMALL

NARROW = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2}
SIX_EXPERTS = {"num_experts": 6}
T, C, E = "tensor_parallel", "context_parallel", "expert_parallel"


@pytest.mark.parametrize(
    ("changes", "layout", "ranks", "message"),
    [
        ({}, {T: 8}, 0, "tensor_parallel=8 must divide the 4 key and value heads of model.path; set it to 4"),
        ({}, {T: 8}, 2, "tensor_parallel=8 must divide the 4 key and value heads of model.path; set it to 2"),
        ({}, {T: 8, C: 4}, 8, "tensor_parallel=8 must divide the 4 key and value heads of model.path; set it to 2"),
        ({}, {T: 3}, 3, "tensor_parallel=3 must divide the 8 attention heads of model.path; set it to 1"),
        ({}, {T: 3}, 0, "tensor_parallel=3 must divide the 8 attention heads of model.path; set it to 4"),
        ({"intermediate_size": 42}, {T: 4}, 0, "tensor_parallel=4 must divide the 42 units of intermediate_size of"),
        (SIX_EXPERTS | {"num_key_value_heads": 8}, {T: 4}, 0, "tensor_parallel=4 must divide the 6 experts of"),
        ({}, {C: 12}, 24, "context_parallel=12 must be at most the number of query heads of model.path, 8; set it to"),
        (SIX_EXPERTS, {E: 4}, 8, "expert_parallel=4 must divide the 6 experts; set it to 2"),
        (SIX_EXPERTS, {E: 4}, 12, "expert_parallel=4 must divide the 6 experts; set it to 3"),
        (SIX_EXPERTS, {E: 4}, 0, "expert_parallel=4 must divide the 6 experts; set it to 3"),
        (NARROW, {T: 2}, 16, "tensor_parallel=2 leaves 8 ranks to split matrices of 36"),
    ],
)
def test_the_remedy_fits_model_and_ranks(changes, layout, ranks, message):
    kind, sizes = (hf.Qwen3MoeConfig, SMALL | EXPERTS) if "num_experts" in changes else (hf.LlamaConfig, SMALL)
    with pytest.raises(FieldError) as raised:
        check_split(kind(**sizes | changes), None, Sharding(**layout), ranks, adapters=False)
    assert str(raised.value).startswith(f"placement.{message}")
    if changes == NARROW:
        return
    remedied = layout | {raised.value.field.rpartition(".")[2]: int(str(raised.value).rpartition(" ")[2])}
    assert not ranks or ranks % (remedied.get(T, 1) * remedied.get(C, 1)) == ranks % remedied.get(E, 1) == 0
    check_split(kind(**sizes | changes), None, Sharding(**remedied), ranks, adapters=False)


def test_whose_model_it_is(tmp_path):
    FAMILIES["Llama"][1].save_pretrained(tmp_path)
    with pytest.raises(FieldError, match=r"must divide the \d+ attention heads of critic\.path; set it to"):
        require_splittable(str(tmp_path), None, Sharding(tensor_parallel=7), adapters=False, name="critic.path")


def test_what_only_the_modules_tell(tmp_path):
    FAMILIES["Mamba"][1].save_pretrained(tmp_path / "recurrent")
    FAMILIES["DeepSeek-V3"][1].save_pretrained(tmp_path / "dense")  # so small that all its layers are dense
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    hf.LlamaConfig(**SMALL, rope_parameters=rope).save_pretrained(tmp_path / "dynamic")
    for name, layout, message in (
        ("recurrent", {C: 2}, "splits packed tokens, and model.path does not keep packed sequences apart"),
        ("dense", {E: 2}, "has no plan for a model whose experts are not stacked; set it to 1"),
    ):
        with pytest.raises(FieldError, match=message):
            require_splittable(str(tmp_path / name), None, Sharding(**layout), 2, adapters=False)
    # positions that are fixed by the longest sequence are split as others are
    require_splittable(str(tmp_path / "dynamic"), None, Sharding(context_parallel=2), 2, adapters=False)


@pytest.mark.parametrize(("family", "expected"), [("Llama", 1), ("Qwen3-MoE", 2), ("Mixtral", 2)])
def test_a_teacher_or_critic_without_experts_has_none_to_split(family, expected, tmp_path):
    FAMILIES[family][1].save_pretrained(tmp_path)
    given = Sharding(expert_parallel=2, context_parallel=2)
    sharding = auxiliary_sharding(given, str(tmp_path))
    assert sharding is not None and (sharding.expert_parallel, sharding.context_parallel) == (expected, 2)
    assert auxiliary_sharding(None, str(tmp_path)) is None


def test_what_has_no_plan_or_another(tmp_path):
    two, unsplit = Sharding(tensor_parallel=2), Sharding()
    for config, message in (
        (hf.GPT2Config(), "gpt2, of model.path, has none; set it to 1"),
        (hf.Phi3Config(pad_token_id=0), "phi3, of model.path, whose plan has colwise_gather_output"),
    ):
        with pytest.raises(FieldError, match=message):
            check_split(config, None, two, 0, adapters=False)
        check_split(config, None, unsplit, 0, adapters=False)
    with pytest.raises(FieldError, match=r"adapters; set it to 1, or model\.lora to null"):
        check_split(MODELS["llama"][1], None, two, 0, adapters=True)
    both = Sharding(tensor_parallel=2, expert_parallel=2)
    for kind, message in (("experts", "and so does expert_parallel"), ("llama", "splits experts, and .* has none")):
        with pytest.raises(FieldError, match=message):
            check_split(MODELS[kind][1], None, both, 0, adapters=False)
    FAMILIES["GPT-2"][1].save_pretrained(tmp_path)
    for read, lora in ((load, None), (load, Lora()), (load_scalar_model, None)):
        with pytest.raises(FieldError, match="placement.tensor_parallel=2"):  # there are no weights
            read(str(tmp_path), device="cpu", lora=lora, sharding=two)


def test_only_packed_attention_splits_tokens():
    with pytest.raises(FieldError, match=r"placement\.context_parallel=2 .*model\.attention=padded"):
        ContextGroup(Sharding(context_parallel=2), torch.device("cpu"), "padded")


def test_an_older_torch_is_refused_before_the_config_is_read(monkeypatch):
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(UserError, match=r"ranks need torch 2\.13 or newer, and .* is installed"):
        load("no-such-folder", sharding=Sharding())
