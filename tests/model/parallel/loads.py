"""What every rank does in `test_slices`: weights read by slices, and gathered again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from proxima.data import FieldError
from proxima.model import LoadedModel
from proxima.model.lora import Lora, adapter_names, base_layer
from proxima.model.parallel import slices
from proxima.model.parallel.gather import gather_into, plain_copy, whole_weights
from proxima.model.parallel.sharding import Sharding
from tests.model.parallel.passes import LORA, source
from tests.model.rows import MIXED, rows

KINDS = ("llama", "qwen2", "qwen3", "gpt2", "many files")


def same_weights(many: LoadedModel, reference: LoadedModel) -> None:
    gathered = [weight for bucket in whole_weights(many.model, bucket=5000) for weight in bucket]
    assert [name for name, _ in gathered] == [name for name, _ in reference.model.named_parameters()]
    for (name, whole), parameter in zip(gathered, reference.model.parameters(), strict=True):
        assert torch.equal(whole, parameter) and whole.dtype == parameter.dtype, name
    for (name, ours), theirs in zip(many.model.named_buffers(), reference.model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    tied = reference.model.get_output_embeddings()
    if tied is not None and base_layer(tied).weight is reference.model.get_input_embeddings().weight:
        assert base_layer(many.model.get_output_embeddings()).weight is many.model.get_input_embeddings().weight
    assert many.stop_tokens == reference.stop_tokens and not many.model.training


def same_copy(many: LoadedModel, reference: LoadedModel) -> None:
    plain = plain_copy(many)
    assert (plain is None) == (dist.get_rank() > 0)
    if plain is not None:
        assert plain.sharding is None and plain.model.config.to_dict() == reference.model.config.to_dict()
        for (name, ours), (other, theirs) in zip(
            plain.model.named_parameters(), reference.model.named_parameters(), strict=True
        ):
            assert name == other and torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad, name
        for ours, theirs in zip(plain.model.buffers(), reference.model.buffers(), strict=True):
            assert torch.equal(ours, theirs)
        if reference.model.get_output_embeddings() is not None:
            policies = [source(Path("x")).policy(loaded) for loaded in (plain, reference)]
            outputs = [p(p.pack(rows(*MIXED))).log_prob for p in policies]
            assert torch.equal(*outputs)


def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a rank that loads a whole model fails."""
    from transformers import PreTrainedModel

    def refuse(*_, **__):
        raise AssertionError("a rank loads the whole model")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)


def all_loads(rank: int, folder: Path) -> None:
    references = {kind: source(folder / kind).load() for kind in KINDS}
    scalar = source(folder / "qwen2").load_scalar(head_std=0.3)
    half = source(folder / "qwen2", dtype="bfloat16").load()
    whole_lora = Lora(rank=3, init="gaussian")
    plain_adapters = {
        (kind, lora): source(folder / kind, lora=lora, seed=3, dtype="bfloat16").load()
        for kind in ("llama", "qwen2")
        for lora in (whole_lora, replace(LORA, dora=False))
    }
    for layout in (Sharding(), Sharding(offload=True), Sharding(kind="replicate")):
        with pytest.MonkeyPatch.context() as monkeypatch:
            never_whole(monkeypatch)
            many = {kind: source(folder / kind, sharding=layout).load() for kind in KINDS}
            for kind in KINDS:
                same_weights(many[kind], references[kind])
            same_copy(many["llama"], references["llama"])
            same_copy(many["qwen2"], references["qwen2"])
            same_weights(source(folder / "qwen2", sharding=layout, dtype="bfloat16").load(), half)
            head = source(folder / "qwen2", sharding=layout).load_scalar(head_std=0.3)
            same_weights(head, scalar)
            same_copy(head, scalar)
            for kind, lora in (("qwen2", whole_lora), ("llama", whole_lora), ("llama", replace(LORA, dora=False))):
                place = {"lora": lora, "seed": 3, "dtype": "bfloat16"}
                adapter = source(folder / kind, sharding=layout, **place).load()
                assert len(adapter_names(adapter.model)) > 4
                same_weights(adapter, plain_adapters[kind, lora])
                same_copy(adapter, plain_adapters[kind, lora])
    adapted = [source(folder / "qwen2", lora=LORA, sharding=s).load() for s in (None, Sharding())]
    same_weights(adapted[1], adapted[0])
    same_copy(adapted[1], adapted[0])
    plain = plain_copy(adapted[1])
    with torch.no_grad():
        for name in adapter_names(adapted[1].model):
            adapted[1].model.get_parameter(name).mul_(2).add_(0.5)
            adapted[0].model.get_parameter(name).mul_(2).add_(0.5)
    target = None if plain is None else plain.model
    gather_into(adapted[1].model, target, trained_only=True)
    if plain is not None:
        for ours, theirs in zip(plain.model.parameters(), adapted[0].model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    refused(folder)


def refused(folder: Path) -> None:
    for broken in ("lacks", "not finite"):
        messages = []
        for layout in (None, Sharding()):
            with pytest.raises(FieldError) as error:
                source(folder / broken, sharding=layout).load()
            messages.append(str(error.value))
        assert messages[0] == messages[1] and ("lacks 1" in messages[0] or "NaN" in messages[0])
    assert slices.sliceable_files(str(folder / "model.gguf"), None) is None
