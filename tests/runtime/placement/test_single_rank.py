"""A single rank trains like an ordinary process; where a field of `placement.sharding` is set, it shards its models
over itself and computes the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from proxima.config.sections.placement import FullSharding, HybridSharding, ReplicatedModel, TorchrunPlacement
from tests.runtime.placement.launched import one_by_one, ranked

COMPUTED = ("step", "label", "reward/mean", "accuracy", "length/mean", "loss", "grad_norm", "lr")


def trained(model: Path, folder: Path, sharding: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[str]]:
    """Weights and metrics of a run on one rank, and the files of its optimizer's last checkpoint."""
    words = ranked(model, folder, placement__sharding=sharding, train__max_grad_norm=0.1)
    ((code, errors, printed),) = one_by_one(words)
    assert code == 0, errors + printed
    last = max((folder / "checkpoints").iterdir())
    weights: dict[str, Tensor] = {}
    for file in (last / "model").glob("*.safetensors"):
        weights |= load_file(file)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = [{name: line[name] for name in COMPUTED if name in line} for line in lines]
    return weights, metrics, [file.name for file in last.rglob("shard-*")]


@pytest.mark.slow
def test_a_rank_sharded_over_itself_has_the_bits_of_an_ordinary_process(tiny_model: Any, tmp_path: Path) -> None:
    weights, metrics, shards = trained(tiny_model(), tmp_path / "plain", "full")
    own_weights, own_metrics, own_shards = trained(tiny_model(), tmp_path / "own", {"kind": "full", "offload": True})
    assert own_metrics == metrics and any("loss" in line for line in metrics)
    assert own_weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(own_weights[name], weight), name
    assert own_shards and not shards


@pytest.mark.parametrize(
    ("sharding", "ranks", "shards"),
    [
        (FullSharding(), "1", False),
        (ReplicatedModel(param_dtype="bfloat16"), "1", False),
        (FullSharding(param_dtype="bfloat16"), "1", True),
        (HybridSharding(), "1", True),
        (FullSharding(), "2", True),
        (FullSharding(), None, True),  # not launched yet
    ],
)
def test_one_rank_shards_where_a_setting_says_how(
    sharding: Any, ranks: str | None, shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert TorchrunPlacement(sharding=sharding).shards_models is shards
