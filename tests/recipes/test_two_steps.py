"""Every recipe, and every cell of a sweep of recipes, makes two steps with a tiny model of the same architecture.

Model, data and sizes are other ones, by name: all else is that of the recipe.
"""

import math
import re
from pathlib import Path

import pytest

from proxima.config.families import TRAIN, family_name, family_of
from proxima.config.recipe_reader import read_recipe
from proxima.config.resolution import resolve
from proxima.experiments.sweep_file import read_sweep
from proxima.runtime.launch.run import train
from proxima.runtime.state.folder import RunFolder
from proxima.task.protocol import is_played
from tests.recipes.smaller import smaller
from tests.recipes.talker import questions, talker

pytestmark = pytest.mark.usefixtures("lent_servers", "warm_processes")
FOLDER = Path(__file__).resolve().parents[2] / "recipes"
SWEEPS = sorted(FOLDER.glob("sweeps/*.yaml"))
RECIPES = sorted({*FOLDER.glob("**/*.yaml")} - {*SWEEPS, *FOLDER.glob("layouts/*")})
STAND_INS = {  # a recipe → those that differ from it in numbers, or in parts that have tests of their own
    "quickstart": r"cpu/(dppo|drpo|grpo|gspo)|grpo_cppo-.*",
    "classic/reward": "cpu/reward",
    "classic/sft": "cpu/sft",
    "classic/dpo": "cpu/dpo",
    "cpu/dapo_tis": r"(cpu/)?dapo_.*|cpu/dapo|cpu/is_.*",
    "prune_gsm8k-p50": r"(cpu/cppo_)?prune.*|gsm8k|gsm8k_cppo|classic/questions",
    "qwen3_30b_cppo": r"qwen3_.*",
}
RUNS_OF = {  # a test of runs that have the same parts → recipes
    "test_critic.py::test_the_policy_waits_for_the_critic": "classic/ppo|cpu/ppo_critic",
    "test_distillation.py::test_a_student_gets_nearer_to_its_teacher": "cpu/distill",
    "test_lora_run.py::test_a_checkpoint_holds_the_adapter_and_its_moments_alone": "cpu/lora",
    "test_online_dpo.py::test_a_run_trains_on_the_best_and_the_worst_of_each_prompt": "cpu/online_dpo",
    "test_sampling_mask_run.py::test_the_first_step_of_a_run_measures_no_mismatch": r"cpu/top_p.*",
    "test_sdp_run.py::test_what_the_steps_read_is_what_a_replay_with_the_saved_weights_gives": r".*sdp",
}
# of made questions and a made model, and with images: tests/examples have them; with a judge: tests/runtime
ELSEWHERE = {"search", "cpu/vision", "clevr_count", "geo3k", "cpu/judge"}
NAMES = {name: path for path in RECIPES if (name := str(path.relative_to(FOLDER).with_suffix(""))) not in ELSEWHERE}
OFFLINE = {name: path for name, path in NAMES.items() if family_of(read_recipe(path)) is not TRAIN}
CASES = {name: (path, ()) for name, path in NAMES.items() if name not in OFFLINE}
CASES["own_reward"] = (FOLDER.parent / "examples" / "own_reward" / "recipe.yaml", ())
for sweep in map(read_sweep, SWEEPS):
    CASES |= {f"{sweep.file.stem}-{cell.name}": (sweep.recipe, cell.overrides) for cell in sweep.cells}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


def resolved_small(case, root, folder):
    recipe, overrides = CASES[case]
    published = resolve(recipe, overrides).config
    sizes = ("train.", "eval.", "checkpoint.")  # of a cell, too
    cell = [text for text in overrides if not text.startswith(sizes)]
    return resolve(recipe, [*cell, *smaller(published, root), f"folder={folder}"])


@pytest.mark.slow
def test_every_recipe_resolves_and_can_be_made_small(root, tmp_path):
    for case in CASES:
        assert resolved_small(case, root, tmp_path / "run").config.train.steps == 2


def tiers(test, cases):
    """The cases of a test; one that another stands for is a campaign."""
    small = {f"tests/recipes/test_two_steps.py::{test}[{name}]": others for name, others in STAND_INS.items()}
    small |= {f"tests/runtime/{name}": others for name, others in RUNS_OF.items()}
    for case in cases:
        sibling = next((name for name, others in small.items() if re.fullmatch(others, case)), None)
        campaign = sibling is not None and case not in STAND_INS
        yield pytest.param(case, marks=pytest.mark.campaign(sibling)) if campaign else case


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers("test_two_steps", CASES))
def test_two_steps(case, root, tmp_path):
    resolved = resolved_small(case, root, tmp_path / "run")
    config = resolved.config
    assert train(config, resolved=resolved).status == "done"

    folder = RunFolder(tmp_path / "run")
    records = [record for record in folder.read_metrics() if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
        assert record["reward/invalid"] == 0
        assert {f"reward/part/{reward.label}" for reward in config.reward} <= set(record)
    assert any(record["grad_norm"] > 0 for record in records)
    assert any(0 < record.get("accuracy", record["reward/mean"]) < 1 for record in records)
    assert all(("episode/turns/mean" in record) == is_played(config.task) for record in records)


# A recipe → the kinds of its task and of its held-out one; the others read no file.
OFFLINE_DATA = dict.fromkeys(("classic/dpo", "classic/reward"), ("pairs", "pairs"))
OFFLINE_DATA |= {"classic/sft": ("gsm8k", "gsm8k"), "cpu/tools_start": ("episodes",)}


def made_episodes(root):
    """As the header of cpu/tools_start says."""
    from examples.calculator_episodes import main

    main(8, root / "episodes.jsonl")
    return root / "episodes.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers("test_two_steps_on_a_fixed_data_set", OFFLINE))
def test_two_steps_on_a_fixed_data_set(name, root, tmp_path):
    published = resolve(OFFLINE[name], root=None).config
    values = {"model.path": talker(published.model.path, root), "model.device": "cpu", "folder": tmp_path / "run"}
    values |= {"train.steps": 2, "train.examples_per_step": 4, "train.warmup_ratio": 0, "runtime.threads": 1}
    values |= {"eval.limit": 3, "eval.every": 1, "checkpoint.every": 0}
    kinds = dict(zip(("task", "eval.task"), OFFLINE_DATA.get(name, ()), strict=False))
    for slot, task in (("task", published.task), ("eval.task", published.eval.task)):
        if slot in kinds:
            values[f"{slot}.path"] = made_episodes(root) if kinds[slot] == "episodes" else questions(root)[kinds[slot]]
        elif hasattr(task, "size"):
            values[f"{slot}.size"] = 16
    if family_name(published) == "dpo":
        values["preference.cache"] = "null"
    resolved = resolve(OFFLINE[name], [f"{key}={value}" for key, value in values.items()], root=None)
    assert train(resolved.config, resolved=resolved).status == "done"
    records = RunFolder(tmp_path / "run").read_metrics()
    measured = [0, 1, 2] if resolved.config.eval.task else []
    assert [r["step"] for r in records if r["kind"] == "eval"] == measured
    assert all(math.isfinite(r["loss"]) and r["examples"] > 0 for r in records)
    assert any(r.get("grad_norm", 0) > 0 for r in records)
