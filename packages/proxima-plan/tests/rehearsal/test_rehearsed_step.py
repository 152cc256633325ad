"""Every training kind on a fake device: nothing is on the wrong device, and what waits is listed here."""

import json
import shutil
from dataclasses import replace

import pytest

from proxima_plan.rehearsal.fake_training import StepShape

SHAPE = StepShape(groups=4, size=2, prompt=8, length=16, updates=2)

RL = "quickstart.yaml"
PADDED = "model.attention=padded"
KL = "algorithm.reference_kl={kind: k3, coefficient: 0.1}"

# Waits of a step with two updates, by function, whatever the number of micro-batches. A step that waits more often, or
# elsewhere, must be entered here, with a reason.
UPDATE = {
    "TrainStack._step": 2,  # the gradient norm: is it finite, or 0
    "TrainStack._weight_norm": 3,  # before, and after each update
    "TrainStack.update": 1,  # the loss
}
STATISTICS = {"HostCopies.wait": 2}  # the token statistics of each update
METRICS = {"on_host": 1}
POLICY = UPDATE | STATISTICS | METRICS
FILLED = POLICY | {"HostCopies.wait": 3}  # and a forward stage before the updates
CRITIC = {name: 2 * count for name, count in POLICY.items()} | {"HostCopies.wait": 3}  # two models; values, statistics
LISTED = {"next policy": 3}  # inside a micro-batch: which tokens lack `next_log_prob`, only the device knows

CASES: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "policy gradient": (RL, ["algorithm=grpo"], POLICY),
    "cppo": (RL, [], POLICY),
    "recompute": (RL, ["algorithm.proximal=recompute"], FILLED),
    "loglinear": (RL, ["algorithm.proximal=loglinear"], POLICY),
    "offloaded moments": (
        RL,
        ["train.optimizer={kind: adamw, offload: true}"],
        POLICY | {"OffloadedAdamW._step_pieces": 2},
    ),
    "importance sampling": (RL, ["algorithm.correction=[importance]"], POLICY),
    "reference": (RL, [KL], FILLED),
    "lora": (RL, ["model.lora={rank: 4}", KL], FILLED),
    "checkpointing, bf16": (RL, ["model.gradient_checkpointing=true", "model.compute_dtype=bfloat16"], POLICY),
    "padded": (RL, [PADDED], POLICY),
    "entropy": (RL, ["algorithm.entropy_bonus=0.01"], POLICY),
    "pruning": ("cpu/cppo_prune.yaml", [], FILLED),
    "sampling masks": ("cpu/top_p_replay.yaml", [], POLICY),
    "distillation": ("cpu/distill.yaml", ["algorithm.distillation.path=MODEL"], FILLED),
    "online dpo": ("cpu/online_dpo.yaml", [], FILLED),
    "sft": ("cpu/sft.yaml", [], UPDATE),
    "dpo": ("cpu/dpo.yaml", [], POLICY),
    "dpo over the whole batch": ("cpu/dpo.yaml", ["preference.loss=[aot]"], POLICY),
    "kto": ("cpu/dpo.yaml", ["preference.loss=[kto]"], UPDATE | METRICS),
    "reward model": ("cpu/reward.yaml", [], UPDATE | METRICS),
    "critic": (RL, ["algorithm=ppo", "critic=model"], CRITIC),
    "value head": (RL, ["algorithm=ppo", "critic=head"], FILLED),
    "clip_cov": (RL, ["algorithm.surrogate=clip_cov"], POLICY),
    "m2po": (RL, ["algorithm.surrogate=m2po"], POLICY),
    "second_moment": (RL, ["algorithm.correction=[second_moment]"], POLICY),
    "dropping rejection": (RL, ["algorithm.correction=[{kind: rejection, rejected: drop, upper: 2}]"], POLICY),
    "next policy": ("cpu/sdp.yaml", [], FILLED | {"LossTokens.of": 12}),
}


HERE = "packages/proxima-plan/tests/rehearsal/test_rehearsed_step.py::"
SIBLINGS = {  # kinds with the waits of another one, which `make test` runs: the parts of a step are the same
    "value head": (
        "critic",
        "cppo",
        "policy gradient",
        "loglinear",
        "importance sampling",
        "checkpointing, bf16",
        "padded",
        "entropy",
        "sampling masks",
        *("reference", "recompute", "lora", "pruning", "next policy"),
    ),
    "dpo over the whole batch": ("online dpo", "dpo", "kto", "reward model", "sft"),
    "clip_cov": ("m2po", "second_moment", "dropping rejection"),
}


def kinds():
    for name in CASES:
        sibling = next((sibling for sibling, names in SIBLINGS.items() if name in names), None)
        place = f"{HERE}test_a_training_kind[{sibling}]"
        yield pytest.param(name, marks=[pytest.mark.campaign(place)] if sibling else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_a_training_kind(rehearse, name):
    recipe, overrides, waits = CASES[name]
    watched = rehearse("rehearsed", recipe, overrides)
    assert watched.updates == (4 if name == "critic" else 2)
    assert watched.micro_batches >= 4
    assert watched.inside.total() == LISTED.get(name, 0) * watched.micro_batches
    assert watched.places == waits
    assert sum(watched.rehearsal.waits.values()) == watched.places.total()


@pytest.mark.slow
def test_a_tensor_on_the_host_is_a_fault_with_its_line(rehearse):
    fault = rehearse("fault_of", "cpu/sft.yaml", [], "OnTheHost")
    assert "worker.py:" in fault and "same device" in fault and "cpu" in fault


@pytest.mark.slow
def test_waits_inside_micro_batches_are_counted(rehearse):
    watched = rehearse("with_objective", "cpu/sft.yaml", [], "Impatient")
    each = watched.micro_batches
    assert watched.inside == {"index by a mask": each, "item": each, "copy to the device": each}


@pytest.mark.slow
def test_a_rank_of_eight(rehearse):
    alone, single = rehearse("rehearsed", *CASES["clip_cov"][:2]), rehearse("rehearsed", RL, [], SHAPE, 8)
    assert not single.inside and single.micro_batches == alone.micro_batches
    assert single.places == POLICY
    weights = [watched.rehearsal.peak_bytes["weights"] for watched in (single, alone)]
    assert weights[0] < 0.2 * weights[1]  # an eighth, in blocks of 512 bytes


def test_large_states_in_host_memory_take_none(rehearse):
    large, small, waits = rehearse("host_states", RL, [])
    assert large < 16 <= small and set(waits) == {"copy to the host", "copy to the device"}


SPLIT = HERE + "test_ranks_that_split_tokens[quickstart.yaml]"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RL, pytest.param("cpu/top_p_replay.yaml", marks=pytest.mark.campaign(SPLIT))])
def test_ranks_that_split_tokens(rehearse, recipe):
    single = rehearse("rehearsed", recipe, ["placement={kind: torchrun, context_parallel: 2}"], SHAPE, 4)
    assert not single.inside and single.micro_batches >= 4
    assert single.places == POLICY


@pytest.mark.slow
def test_experts_of_a_rank(rehearse):
    split = ["placement={kind: torchrun, expert_parallel: 2}"]
    cases = ([], replace(SHAPE, groups=1), 1), (split, SHAPE, 4)
    alone, rank = (rehearse("rehearsed", RL, *case, kind="qwen3_moe") for case in cases)
    exchanged = {"_exchanging": 2 * rank.micro_batches}  # how many rows go where, once in each of the two layers
    assert alone.places == POLICY and rank.places == POLICY | exchanged
    assert not alone.inside and rank.inside.total() == 2 * rank.micro_batches
    assert rank.rehearsal.peak_bytes["weights"] < 0.3 * alone.rehearsal.peak_bytes["weights"]


@pytest.mark.campaign(HERE + "test_experts_of_a_rank")
def test_experts_in_float32_wait_for_each_layer(rehearse):
    """Grouped products, which CUDA has in bfloat16 alone."""
    wide = rehearse("rehearsed", RL, ["model.compute_dtype=float32"], SHAPE, 1, kind="qwen3_moe")
    assert wide.inside.total() == 4 * wide.micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["model.lora={rank: 4}"]])
def test_new_weights_leave_the_devices_without_a_wait_or_a_whole_copy(more, rehearse, one_layer, tmp_path):
    """Of a model with 24 layers on four ranks, a bucket for each tensor: at most a layer, the embedding and two buckets
    are there. The proof waits once, for its log-probs."""
    shutil.copytree(one_layer, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 24}))
    layout = ["placement={kind: torchrun}", "model.compute_dtype=bfloat16", *more]
    sent = rehearse("weights_sent", RL, layout, 4, kind=str(tmp_path))
    assert sent.bytes > 0 and not sent.waits
    assert sent.held < 0.25 * sent.whole
    assert dict(sent.proof) == {"trainer_log_prob": 1}
