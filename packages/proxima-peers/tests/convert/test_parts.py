"""A part that the file lacks stops the recipe until it is filled in; launch commands; evaluations."""

import pytest
import yaml

from proxima.cli.main import main
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima_peers.convert.conversion import convert

VERL = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}, model: {path: org/m}}\n"
PRIME_RL = {"orchestrator.group_size": 8, "orchestrator.train.source": [{"name": "sums"}], "max_steps": 5}
PRIME_RL |= {"orchestrator.train.sampling.max_completion_tokens": 64}


@pytest.mark.parametrize("command", ["train", "explain", "plan"])
def test_a_recipe_that_lacks_a_part_is_refused(converted, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(converted("prime_rl", PRIME_RL).text)
    assert main([command, "r.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    where = "orchestrator.train.source: the environment sums of `verifiers` gives the"
    assert [line.partition(" (r.yaml")[0] for line in lines] == ["error: task.kind", "error: reward.0.kind"]
    assert all(f"must be filled in: {where}" in line and "on the command line" in line for line in lines)


def test_a_part_is_filled_in_on_the_command_line_or_in_the_file(converted):
    recipe = converted("prime_rl", PRIME_RL).recipe
    assert recipe["task"]["kind"].startswith("TO FILL IN: ")
    config = resolve(recipe, ["task=gsm8k", "reward.0.kind=gsm8k"]).config
    assert type(config.task).__name__ == "Gsm8kTask"
    with pytest.raises(ConfigError, match=r"^reward\.0\.kind \(mapping\): must be filled in: "):
        resolve(recipe | {"task": "gsm8k"})


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({}, None),
        ({"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1}, None),
        ({"trainer.n_gpus_per_node": 4}, {"kind": "ray", "ranks": 4}),
        (
            {"trainer.nnodes": 2, "actor_rollout_ref.rollout.name": "vllm"},  # of 8 GPUs each, verl's default
            {"kind": "ray", "ranks": 16, "engines": 16, "colocate": True},
        ),
        (
            {
                "trainer.n_gpus_per_node": 8,
                "actor_rollout_ref.rollout.name": "vllm",
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
            },
            {"kind": "ray", "ranks": 8, "engines": 4, "colocate": True},
        ),
        (
            {
                "trainer.n_gpus_per_node": 6,
                "actor_rollout_ref.rollout.name": "vllm",
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
            },
            {"kind": "ray", "ranks": 6},
        ),
    ],
)
def test_the_gpus_of_verl_become_a_placement(converted, options, placement):
    told = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
    draft = converted("verl", told | {"actor_rollout_ref.model.path": "org/m"} | options)
    assert draft.recipe.get("placement") == placement
    resolve(draft.recipe, ["task=gsm8k", "reward.0.kind=gsm8k"])
    assert not {"trainer.n_gpus_per_node", "trainer.nnodes"} & {one.name for one in draft.unsupported}


def test_the_gpus_of_verls_sft_become_a_placement(converted):
    told = {"data.train_files": "a.parquet", "model.path": "org/m", "optim.lr": 1e-5, "data.multiturn.enable": True}
    draft = converted("verl", told | {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2})
    assert draft.recipe["placement"] == {"kind": "ray", "ranks": 4}


@pytest.mark.parametrize(
    ("peer", "options", "fields"),
    [
        ("trl", {"num_generations": 8, "reward_funcs": ["near"]}, ["model.path", "task.kind", "reward.0.kind"]),
        ("verl", {"algorithm.adv_estimator": "grpo"}, ["model.path", "task.kind", "reward.0.kind"]),
        ("areal", {"gconfig.n_samples": 4}, ["model.path", "task.kind", "reward.0.kind"]),
        ("unirl", {"algorithm._target_": "x.CPPO"}, ["model.path", "task.kind", "reward.0.kind"]),
        ("trl", {"loss_type": "sigmoid"}, ["model.path", "task.path"]),
    ],
)
def test_no_part_is_made_up(converted, peer, options, fields):
    with pytest.raises(ConfigError) as caught:
        resolve(converted(peer, options).recipe, root=None)
    assert [problem.path for problem in caught.value.problems] == fields


HERE = [
    "$(pwd)",
    "`pwd`",
    "$PWD",
    '"$(cd "$(dirname "$0")" && pwd)"',
    '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
]


@pytest.mark.parametrize("folder", HERE)
def test_a_config_path_of_the_working_folder(tmp_path, folder):
    (tmp_path / "mine.yaml").write_text(VERL)
    command = (
        f"python3 -m verl.trainer.main_ppo --config-path={folder} --config-name=mine data.train_batch_size=16 ~a.b\n"
    )
    (tmp_path / "run.sh").write_text(command)
    done = convert(tmp_path / "run.sh", "verl").filled
    assert done["model"]["path"] == "org/m" and done["train"]["completions_per_prompt"] == 4
    assert done["train"]["prompts_per_step"] == 16


def test_a_config_that_is_not_here_is_named(tmp_path):
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo --config-path=$(pwd) --config-name=no algorithm.gamma=1\n"
    )
    missing = {entry.name: entry.why for entry in convert(tmp_path / "run.sh", "verl").missing}
    assert "the options of no come first, and that file is not found from here" in missing["config"]


UNIRL = "algorithm: {_target_: unirl.algorithms.cppo.CPPO, cppo_delta: 0.1}\nbatch_size: 64\n"


@pytest.mark.parametrize(
    "command",
    [
        "python -m unirl.train_ar --config-name=ar/mine batch_size=32",
        "ENTRY=train_ar bash examples/run_experiment_single_node.sh ar/mine batch_size=32 num_devices=8",
        "EXPERIMENT=ar/mine examples/run_experiment_single_node.sh batch_size=32",
    ],
)
def test_unirls_launch_commands_name_their_config(tmp_path, command):
    (tmp_path / "examples" / "ar").mkdir(parents=True)
    (tmp_path / "examples" / "ar" / "mine.yaml").write_text(UNIRL)
    (tmp_path / "run.sh").write_text(command)
    done = convert(tmp_path / "run.sh", "unirl").filled
    assert (done["algorithm"]["surrogate"]["delta"], done["train"]["prompts_per_step"]) == (0.1, 32)


def test_a_config_of_unirl_that_is_a_recipe_here_is_named(tmp_path, capsys):
    command = "bash examples/run_experiment_single_node.sh ar/qwen3_dppo_4b_base_dapo_sglang"
    (tmp_path / "run.sh").write_text(command)
    assert main(["peers", "convert", str(tmp_path / "run.sh")]) == 2
    assert "the recipe of it here is qwen3_4b_dppo\n" in capsys.readouterr().err


EVALUATION = "accelerate launch src/open_r1/eval_gsm.py --model_name_or_path=org/pruned --dataset_name=openai/gsm8k "
EVALUATION += "--eval_strategy=steps --num_generations=16 --max_completion_length=1024 --temperature=1.0"
VALIDATION = "python3 -m verl.trainer.main_ppo trainer.val_only=True actor_rollout_ref.model.path=org/pruned "
VALIDATION += "data.val_files=data/gsm8k/test.parquet"


@pytest.mark.parametrize(("peer", "text"), [("trl", EVALUATION), ("verl", VALIDATION)])
def test_an_evaluation_becomes_a_command(tmp_path, peer, text):
    (tmp_path / "eval.sh").write_text(text)
    done = convert(tmp_path / "eval.sh", peer)
    assert "The file evaluates a model and trains nothing: proxima eval org/pruned RECIPE.yaml" in done.head
    held_out = done.recipe["eval"]
    assert held_out["task"]["kind"] == "gsm8k" or held_out["task"]["path"] == "data/gsm8k/test.parquet"
    assert (held_out["samples"], held_out["sampling"]["temperature"]) == (1, 0)
    assert yaml.safe_load(done.text) == done.recipe


OF_THE_FORK = {
    "method": "src/open_r1/grpo_gsm.py --save_strategy=best --pruning=0.5 --metric=smallest --allocation",
    "baseline": "src/open_r1/grpo_gsm.py --save_strategy=best",
    "evaluation": "src/open_r1/eval_gsm.py --save_strategy=no",
}
SETTINGS = "dataset_name: openai/gsm8k\nreward_funcs: [accuracy, format]\neval_strategy: steps\neval_steps: 100\n"
SETTINGS += "use_vllm: true\nbeta: 0.04\ntemperature: 1.0\nmetric_for_best_model: eval_accuracy\n"


def test_completion_pruning_its_baseline_and_its_evaluation_share_trainer_and_rewards(tmp_path):
    (tmp_path / "gsm8k.yaml").write_text(SETTINGS, encoding="utf-8")
    recipes = {}
    for name, program in OF_THE_FORK.items():
        script = tmp_path / f"{name}.sh"
        script.write_text(f"accelerate launch --num_processes=1 {program} --config gsm8k.yaml", encoding="utf-8")
        recipes[name] = convert(script, "trl").recipe
    selections = {name: recipe["algorithm"].pop("selection", []) for name, recipe in recipes.items()}
    assert {name: len(selection) for name, selection in selections.items()} == {
        "method": 1,
        "baseline": 0,
        "evaluation": 0,
    }
    method, *others = recipes.values()
    for section in ("algorithm", "reward", "sampling"):
        assert [other[section] for other in others] == [method[section]] * 2
    assert [(each["kind"], each.get("pattern")) for each in method["reward"]] == [
        ("accuracy_1_5_2", None),
        ("format", None),
    ]
    assert method["algorithm"].get("correction", []) == [] and not method["algorithm"]["reference_kl"]["unbiased"]
    for recipe in recipes.values():
        assert (recipe["eval"]["samples"], recipe["eval"]["sampling"]["temperature"]) == (1, 0)
    for name in ("method", "baseline"):
        assert recipes[name]["checkpoint"]["keep_best"] is True and recipes[name]["eval"]["metric"] == "accuracy"
