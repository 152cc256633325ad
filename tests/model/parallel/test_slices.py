"""Weights that each rank reads by itself are those of the files, bit for bit."""

import shutil

import pytest

from proxima.data import FieldError
from proxima.model.adapters.lora import Lora
from proxima.model.load import load
from proxima.model.parallel.sharding import Sharding
from tests.campaigns import campaign
from tests.model.parallel.loads import NO_DORA, loads_of, moved_adapters, refused
from tests.model.parallel.passes import LORA
from tests.model.parallel.ranks import run_ranks

HALF = {"dtype": "bfloat16"}
ADAPTER = {"seed": 3, "dtype": "bfloat16", "lora": Lora(rank=3, init="gaussian")}
REPLICATE, OFFLOAD = {"kind": "replicate"}, {"offload": True}
E2, E4, HYBRID = {"expert_parallel": 2}, {"expert_parallel": 4}, {"kind": "hybrid"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kind", "layout", "settings"),
    [
        (2, "many files", {}, HALF),
        (2, "qwen2", REPLICATE, {"head_std": 0.3}),
        (2, "qwen2", OFFLOAD, ADAPTER | {"lora": NO_DORA}),
        (4, "mixtral", E4, {}),
        (4, "shared", E2 | HYBRID, {}),
        *campaign(
            "tests/model/parallel/test_slices.py::test_read_and_gathered_weights_are_those_of_the_files",
            [
                (4, "gpt2", {}, HALF),
                (4, "many files", {}, {}),
                (4, "llama", REPLICATE, ADAPTER),
                (4, "qwen2", {}, {"lora": LORA}),
                *((4, kind, E2, {}) for kind in ("qwen3_moe", "six")),
                *((4, kind, {}, {}) for kind in ("qwen2", "qwen3", "qwen3_moe")),
                (4, "qwen2", REPLICATE, HALF),
                *((4, kind, E2, {}) for kind in ("mixtral", "shared")),
                (4, "qwen3_moe", E4 | OFFLOAD, HALF),
                (4, "six", E2 | HYBRID, {}),
            ],
        ),
    ],
)
def test_read_and_gathered_weights_are_those_of_the_files(size, kind, layout, settings, models):
    """A rank reads its own slices and experts alone, also of files with a tensor for each expert."""
    run_ranks(loads_of, size, models, kind, layout, settings)


@pytest.mark.slow
def test_adapters_that_moved_are_gathered_alone(models):
    run_ranks(moved_adapters, 2, models)


@pytest.mark.slow
def test_missing_and_infinite_weights_are_reported_as_by_one_process(models):
    run_ranks(refused, 2, models)


def test_a_damaged_file_is_told_as_one_process_tells_it(tiny_model, tmp_path):
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    header = b'{"a":{"dtype":"no such","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    for sharding in (None, Sharding()):
        with pytest.raises(FieldError, match=r"model\.path='.*/model' can't be loaded: "):
            load(str(tmp_path / "model"), device="cpu", sharding=sharding)
