"""Slots of the algorithm through whole runs: what only shows from the second step on, or once the results are
written."""

import pytest

from tests.runtime.tiny_run import NO_EVAL, Watcher, go, recipe, rollouts_of, steps_of


@pytest.mark.parametrize("updates", [1, 2])
def test_the_interpolated_centre_knows_the_version_of_the_weights(updates, tiny_model, tmp_path):
    """Synchronous tokens are of the present version, so their centre is the behavior policy: the run is that of
    `behavior`."""
    made = {}
    for proximal in ("behavior", "loglinear"):
        algorithm = {"preset": "grpo", "proximal": proximal}
        changes = {"train__updates_per_step": updates, **NO_EVAL}
        go(tmp_path / proximal, recipe(tiny_model("llama"), algorithm=algorithm, **changes))
        made[proximal] = [record["loss"] for record in steps_of(tmp_path / proximal)]
    assert made["loglinear"] == made["behavior"] and len(made["behavior"]) == 3


def test_a_function_that_says_correct_by_a_number(tiny_model, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def odd(p, c):\n    return {'value': sum(c.tokens) % 7, 'correct': sum(c.tokens) % 2}\n"
    )
    tree = recipe(tiny_model("llama"), reward=[{"kind": "function", "path": f"{tmp_path}/mine.py:odd"}], train__steps=1)
    assert go(tmp_path / "run", tree).status == "done"
    rows = rollouts_of(tmp_path / "run", 1)
    assert [row["correct"] for row in rows] == [sum(row["tokens"]) % 2 == 1 for row in rows]


def test_pruning_and_dynamic_sampling_are_announced_and_done(tiny_model, tmp_path):
    """4 prompts × 4 / 2 = 8 groups a step, drawn from 12 at a time, 2 completions of each trained on."""
    selection = [{"kind": "drop_uniform_groups"}, {"kind": "prune", "rate": 0.5, "allocate": True}]
    infos = []
    watcher = Watcher(on=lambda event, *facts: infos.extend(facts) if event == "started" else None)
    refill = {"oversample": 1.5, "exhausted": "partial"}
    changes = {
        "algorithm__selection": selection,
        "algorithm__dynamic_sampling": refill,
        "train__steps": 1,
        "task__size": 40,
    }
    go(tmp_path / "run", recipe(tiny_model("llama"), **changes), observer=watcher)
    (info,) = infos
    sequences = "8 prompts × 4 completions = 32 sequences, 2 of 4 kept, 12 prompts at a time until it is full"
    assert info.composition == f"{sequences} → micro-batches ≤ 200 tokens → 1 update"
    (step,) = [record for record in watcher.records if record["kind"] == "train"]
    assert (step["prompts_generated"], step["prompts_used"]) == (12 * step["gen_batches"], 8)
    assert step["dropped/pruned"] == 8 * 2
