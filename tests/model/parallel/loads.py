"""What every rank does in `test_slices`: weights read by slices, and gathered again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from proxima.data import FieldError
from proxima.model.adapters.lora import adapter_names
from proxima.model.architecture import base_layer
from proxima.model.packed_model import PackedModel
from proxima.model.parallel import slices
from proxima.model.parallel.gather import gather_into, plain_copy, whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.model.pretrained import LoadedModel
from tests.model.parallel.passes import LORA, source
from tests.model.rows import MIXED, rows, same

NO_DORA = replace(LORA, dora=False)


def same_weights(many: LoadedModel, reference: LoadedModel) -> None:
    gathered = [(name, whole_tensor(parameter)) for name, parameter in many.model.named_parameters()]
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
        ours, theirs = (dict(loaded.model.named_parameters()) for loaded in (plain, reference))
        assert same(ours, theirs) and list(ours) == list(theirs)
        assert all(parameter.requires_grad == theirs[name].requires_grad for name, parameter in ours.items())
        assert same(*(dict(loaded.model.named_buffers()) for loaded in (plain, reference)))
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


def loads_of(rank: int, folder: Path, kind: str, layout: dict[str, Any], settings: dict[str, Any]) -> None:
    """What ranks read is what one process reads, and so is what is gathered of it.

    Args:
        settings: of the source; `head_std` is of a scalar model.
    """
    own = {name: value for name, value in settings.items() if name != "head_std"}
    plain, many = (source(folder / kind, sharding=sharding, **own) for sharding in (None, Sharding(**layout)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "head_std" in settings:
            reference = plain.load_scalar(head_std=settings["head_std"])
            never_whole(monkeypatch)
            loaded = many.load_scalar(head_std=settings["head_std"])
        else:
            reference = plain.load()
            if not own.get("lora", NO_DORA).dora:  # whose norms are of whole weights
                never_whole(monkeypatch)
            loaded = many.load()
        same_weights(loaded, reference)
        same_copy(loaded, reference)


def same_files(plain: PackedModel, sharded: PackedModel) -> None:
    """Of models whose weights have not moved."""
    same_weights(sharded.loaded, plain.loaded)
    same_copy(sharded.loaded, plain.loaded)


def moved_adapters(rank: int, folder: Path) -> None:
    """A copy is given the adapters alone again."""
    plain, many = (source(folder / "qwen2", lora=LORA, sharding=sharding).load() for sharding in (None, Sharding()))
    copy = plain_copy(many)
    with torch.no_grad():
        for model in (plain.model, many.model):
            for name in adapter_names(model):
                model.get_parameter(name).mul_(2).add_(0.5)
    gather_into(many.model, None if copy is None else copy.model)
    assert copy is None or same(*(dict(loaded.model.named_parameters()) for loaded in (copy, plain)))


def refused(rank: int, folder: Path) -> None:
    for broken in ("lacks", "not finite"):
        messages = []
        for layout in (None, Sharding()):
            with pytest.raises(FieldError) as error:
                source(folder / broken, sharding=layout).load()
            messages.append(str(error.value))
        assert messages[0] == messages[1] and ("lacks 1" in messages[0] or "NaN" in messages[0])
    assert slices.sliceable_files(str(folder / "model.gguf"), None) is None
