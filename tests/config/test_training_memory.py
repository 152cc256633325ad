"""What the trainer of one rank holds, term by term."""

from dataclasses import replace

import pytest

from proxima.config import resolve
from proxima.config.estimate import Estimates
from proxima.config.memory_size import ENGINE, forwarded_of, host_memory, memory_of
from proxima.config.model_size import KNOWN
from proxima.config.step_size import StepSize
from proxima.config.training_memory import ACTIVATIONS, GATHERED, Forwarded, Share, rank_share, training_memory
from proxima.model.parallel.sharding import Sharding
from proxima.train import AdamW
from proxima.train.optimizer_8bit import AdamW8bit
from proxima.train.optimizer_muon import Muon

MODEL = KNOWN["qwen3-4b"]
BATCH = StepSize(64, 8, 512, 1100, 500_000, 128, 4096, 1)
FULL = Forwarded(4096, 8192, 0)
SHARDED = ("weights", "gradients", "Adam's two moments")


def held(recipe, share, *overrides, forwarded=FULL):
    return training_memory(resolve(recipe(), list(overrides)).config.model, MODEL, forwarded, share)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_shards_are_divided(recipe, monkeypatch, kind):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    alone, single = held(recipe, Share()), held(recipe, Share(16, Sharding(kind=kind)))
    parts = 16 if kind == "full" else 4
    assert [single[name] for name in SHARDED] == [alone[name] // parts for name in SHARDED]
    assert single[ACTIVATIONS] <= alone[ACTIVATIONS] and single[GATHERED] > 0 == alone[GATHERED]


def test_gradients_are_whole_until_they_are_added_up(recipe):
    whole = 4 * MODEL.parameters
    late = Share(8, Sharding(sum_gradients="update"))
    assert held(recipe, late)["gradients"] == held(recipe, Share(8, Sharding(kind="replicate")))["gradients"] == whole
    assert held(recipe, late, forwarded=replace(FULL, alone=True))["gradients"] < whole / 8 + 1
    assert held(recipe, Share(8, Sharding()))["gradients"] == whole // 8


def test_offloaded_shards_wait_in_host_memory(recipe):
    share, config = Share(8, Sharding(offload=True)), resolve(recipe()).config
    assert not any(held(recipe, share)[name] for name in SHARDED)
    host = host_memory(config, MODEL, share)
    each = 16 * MODEL.parameters // 8
    assert host == {
        "offloaded by each rank": pytest.approx(each, abs=8),
        "plain copy of the weights on rank 0": 4 * MODEL.parameters,
    }
    assert host_memory(config, MODEL, Share()) == {}


def test_the_state_of_each_optimizer(recipe):
    """AdamW: two float32 moments; Muon: one, but for what is in no layer; 8-bit: a code and 1/64 byte of scale."""
    p, layers = MODEL.parameters, MODEL.layers * MODEL.layer
    share, config = Share(8, Sharding()), resolve(recipe()).config

    def state(optimizer, model=MODEL, share=None):
        memory = training_memory(config.model, model, FULL, share or Share(), optimizer)
        return memory["Muon's momentum"], memory["Adam's two moments"]

    assert state(AdamW()) == state(None) == state(object()) == (0, 8 * p)
    assert state(AdamW8bit()) == (0, pytest.approx(2 * p * (1 + 4 / 256), rel=1e-6))
    assert state(Muon()) == (4 * layers, 8 * (p - layers)) and state(Muon(), share=share)[0] == 4 * layers // 8
    experts = KNOWN["qwen3-30b-a3b"]
    assert state(Muon(), experts) == (
        48 * 4 * 2 * 2048 * (4096 + 512),
        8 * experts.parameters - 2 * state(Muon(), experts)[0],
    )
    assert state(AdamW(offload=True)) == (0, 0)
    config = resolve(recipe(), ["train.optimizer.offload=true"]).config
    assert host_memory(config, MODEL, Share()) == {"offloaded by each rank": 8 * p}


def test_ranks_that_split_matrices_tokens_or_experts(recipe, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    experts = KNOWN["qwen3-30b-a3b"]
    half = "sharding: {kind: %s, param_dtype: bfloat16}"

    def parts(dimension, kind="full", forwarded=FULL):
        words = [
            f"placement={{kind: ray, ranks: 8, {dimension}: 2, {half % kind}}}",
            "model.gradient_checkpointing=true",
        ]
        config = resolve(recipe(), words).config
        share = rank_share(config.placement)
        return share, training_memory(config.model, experts, forwarded, share)

    split = {name: parts(f"{name}_parallel") for name in ("tensor", "context", "expert")}
    _, plain = parts("restarts")
    assert [share.shares for share, _ in split.values()] == [4, 4, 8]
    for share, memory in split.values():
        assert [memory[name] for name in SHARDED] == [plain[name] for name in SHARDED]
        assert share.local(experts).layer < experts.layer or share.context == 2
    assert split["tensor"][1]["logits"] < 0.7 * plain["logits"]
    assert split["expert"][1][GATHERED] < 0.7 * plain[GATHERED]
    assert parts("tensor_parallel", "replicate")[1]["weights"] == 4 * experts.parameters // 2

    config = resolve(recipe(), ["model.share_prompt=false"]).config
    whole, part = (forwarded_of(config, BATCH, Share(8, Sharding(context_parallel=c))) for c in (1, 2))
    assert part.tokens == whole.tokens // 2 and part.masked == whole.masked


def test_weights_gathered_in_half_precision_need_no_copies(recipe):
    half = held(recipe, Share(8, Sharding(param_dtype="bfloat16")))
    exact = held(recipe, Share(8, Sharding()))
    copies = "autocast copy of the weights"
    assert half[copies] == 0 < exact[copies] and half[GATHERED] < exact[GATHERED]
    kept = held(recipe, Share(8, Sharding(reshard_after_forward=False)))
    assert kept[GATHERED] >= 4 * MODEL.parameters
    again = held(recipe, Share(8, Sharding()), "model.gradient_checkpointing=true")
    assert again[copies] < exact[copies] / 30 and again[ACTIVATIONS] < exact[ACTIVATIONS] / 5


def test_kernels_of_a_cpu_keep_less(recipe):
    """A layer keeps two sums in float32 and their norms, q, k, v, the output of attention, gate and up; with
    checkpointing its two inputs."""
    fused, whole = replace(FULL, fused=True), held(recipe, Share())
    width = 2 * 6 * 2560 + 2 * (2 * 4096 + 2 * 1024 + 2 * 9728)
    kept = held(recipe, Share(), forwarded=fused)[ACTIVATIONS]
    passing = held(recipe, Share(), "model.gradient_checkpointing=true", forwarded=fused)[ACTIVATIONS]
    assert kept - passing == 35 * 4096 * width - 36 * 4096 * 6 * 2560
    assert kept < 0.7 * whole[ACTIVATIONS]


def test_the_ranks_of_a_placement(recipe, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ray, torchrun = "placement={kind: ray, ranks: 4}", "placement=torchrun"
    placements = [resolve(recipe(), [text]).config.placement for text in ("placement=local", ray, torchrun)]
    assert [rank_share(placement).ranks for placement in placements] == [1, 4, 2]
    assert [rank_share(placement).parts for placement in placements] == [1, 4, 2]
    messages = [note for note in Estimates(resolve(recipe(), [torchrun]), 1e12).notes if "WORLD_SIZE" in note]
    assert len(messages) == 1
    uneven = resolve(recipe(), [torchrun, "placement.tensor_parallel=3"])
    assert (rank_share(uneven.config.placement).ranks, rank_share(uneven.config.placement).shares) == (6, 2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_share(placements[2]).ranks == 8
    assert Estimates(resolve(recipe(), [torchrun, "placement.tensor_parallel=16"]), 1e12).share.shares == 1
    setting = "model.path=Qwen/Qwen3-4B"
    notes = Estimates(resolve(recipe(), [torchrun, setting]), 1e12).notes
    assert not [note for note in notes if "WORLD_SIZE" in note]
    assert "the time is that of one process; 8 ranks share the training" in notes
    assert not [note for note in Estimates(resolve(recipe(), [setting]), 1e12).notes if "ranks share" in note]


def test_the_first_rank_holds_the_engine_too(recipe):
    config = resolve(recipe(), ["placement={kind: ray, ranks: 4}"]).config
    memory = memory_of(config, MODEL, BATCH)
    assert memory["weights"] == MODEL.parameters and any(name in memory for name in ENGINE)
