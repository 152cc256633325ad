"""Every recipe in the folder resolves, says what it is, and stands in a table; the published settings are the published
ones."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.schema import RunConfig
from proxima.config.validate import check, warnings
from proxima.core import CORRECTION_PRESETS, Cppo, Dppo, Drpo, PpoClip
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSumNorm
from proxima.experiments.sweep_file import read_sweep
from proxima.experiments.sweep_plan import plan_runs
from proxima.task.mix import sources_of
from proxima_plan.devices import read_devices
from proxima_plan.forecast import plan_recipe
from proxima_plan.memory import STEADY

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
SWEEPS = sorted(FOLDER.glob("sweeps/*.yaml"))
LAYOUTS = sorted(FOLDER.glob("layouts/*.yaml"))  # to be laid over a recipe
RECIPES = sorted({*FOLDER.glob("**/*.yaml")} - {*SWEEPS, *LAYOUTS})
SMALL = {"quickstart", "gsm8k", "gsm8k_cppo", "search"}
SETTINGS = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
PUBLISHED = [path for path in RECIPES if path.parent == FOLDER and path.stem not in SMALL]
METHODS = dict.fromkeys(("top_p", "top_p_replay", "is_token", "is_sequence", "is_metrics"), "grpo") | {
    "async": "decoupled",
    "judge": "cppo",
    "lora": "cppo",
    "ppo_notebook": "ppo",
    "score_centering": "gpg",
}


def name_of(path):
    return str(path.relative_to(FOLDER).with_suffix(""))


def published(name):
    return resolve(FOLDER / f"{name}.yaml").config


def leaves(config):
    return {entry.path: entry.value for entry in config.entries}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(FOLDER.parent)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_it_resolves_and_is_complete(recipe, tmp_path):
    resolved = resolve(recipe, root=None)
    paths_elsewhere = (
        "model.path",
        "task.path",
        "eval.task.path",
        "algorithm.distillation.path",
        "reward.0.path",
        "critic.path",
    )  # models and data need not be on this machine
    assert [str(p) for p in check(resolved) if p.path not in paths_elsewhere] == []
    assert [str(p) for p in warnings(resolved)] == []
    again = tmp_path / "config.yaml"
    again.write_text(dump(resolved), encoding="utf-8")
    assert resolve(again, root=None).config == resolved.config


@pytest.mark.parametrize("recipe", RECIPES + SWEEPS + LAYOUTS, ids=name_of)
def test_it_stands_in_a_table(recipe):
    assert f"[`{recipe.name}`]({os.path.relpath(recipe, FOLDER)})" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_layout_is_complete_with_each_recipe_of_its_model(layout):
    """It divides the model, the devices are those of its name, and nothing is wrong but what is not on this machine."""
    family, _, devices = layout.stem.rpartition("_")
    recipes = [path.stem for path in PUBLISHED if path.stem.startswith(family)]
    assert len(recipes) >= 4
    for recipe in recipes:
        resolved = resolve(recipe, [f"@{name_of(layout)}"])
        elsewhere = ("model.path", "task.path", "eval.task.path", "engine.serve", "placement.kind")
        assert [str(p) for p in check(resolved) if not p.path.startswith(elsewhere)] == []
        assert [str(p) for p in warnings(resolved)] == []
        config, plain = resolved.config, published(recipe)
        assert (config.algorithm, config.sampling, config.reward) == (plain.algorithm, plain.sampling, plain.reward)
        planned = plan_recipe(resolved, read_devices(f"{devices}-80G")[0])
        assert planned.memory.fits and planned.layout.devices == int(devices.partition("x")[0])
        assert config.engine.serve.arguments == ("--tensor-parallel-size", str(planned.layout.engine_devices))
        held = sum(planned.memory.trainer.get(kind, 0) for kind in STEADY)  # beside a server that is awake
        assert config.engine.serve.gpu_memory + held / planned.memory.memory < 0.98


@pytest.mark.parametrize("recipe", PUBLISHED, ids=name_of)
def test_a_published_setting_says_what_it_is(recipe):
    head = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    text = "\n".join(head)
    for word in ("Source", "Published", "Ran on", "Here", "Differs"):
        assert re.search(rf"^#   .*\b{word}\b", text, re.MULTILINE), f"{recipe.name} does not say: {word}"
    assert re.search(r"arXiv \d{4}\.\d{5}|verl recipe/", text)
    assert re.search(rf"proxima train {recipe.stem} (@layouts/\S+ )?folder=runs/{recipe.stem}\b", text)
    assert f"proxima eval runs/{recipe.stem}" in text


@pytest.mark.parametrize("file", FOLDER.glob("sweeps/prune_*.yaml"), ids=name_of)
def test_every_cell_of_a_pruning_sweep_is_a_run(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # with the data that it names, but for their content
    for name in ("math/train", "math500/test"):
        (tmp_path / f"data/{name}.parquet").parent.mkdir(parents=True)
        (tmp_path / f"data/{name}.parquet").touch()
    sweep = read_sweep(file)
    runs = {run.cell: run.resolved.config for run in plan_runs(sweep)}
    small = ("g8", "g2") if "gsm8k" in file.stem else ("g4",)
    assert list(runs) == ["none", "p50", "p75", "p875", "p9375", *small]
    asked, updated = set(), set()
    for config in runs.values():
        size, prompts = config.train.completions_per_prompt, config.train.prompts_per_step
        for spec in config.algorithm.selection:
            prompts, size = prompts * spec.prompts_factor(size), spec.kept(size)
        updated.add(prompts * size)
        asked.add(prompts * config.train.steps // 100)
        assert config.train.warmup_steps == round(0.1 * config.train.steps * config.train.epochs_per_step)
    assert updated == {128}  # completions: an update keeps its size
    assert asked == {74} if "gsm8k" in file.stem else asked <= {74, 75}  # hundreds of questions: one epoch each


@pytest.mark.parametrize("name", SETTINGS)
def test_it_has_its_published_settings(name):
    settings = SETTINGS[name]
    lists = tuple({re.match(r"(.*?\.)\d", path)[1] for path in settings if re.search(r"\.\d", path)})
    found = leaves(resolve(FOLDER / f"{name}.yaml"))
    assert {path: found[path] for path in found if path in settings or path.startswith(lists)} == settings


SUMMED = {"4b": SequenceMeanTokenSumNorm(horizon=8192.0), "30b": SequenceMeanTokenSumNorm(horizon=16384.0)}


@pytest.mark.parametrize("size", ["4b", "30b"])
def test_the_trust_regions_differ_in_the_loss_alone(size):
    delta = {"4b": 0.15, "30b": 0.20}[size]
    expected = {
        "grpo": PpoClip(epsilon_low=0.2, epsilon_high=0.28),
        "dppo": Dppo(delta=delta),
        "cppo": Cppo(delta=delta, w_min=0.8, delta_b=0.02),
        "drpo": Drpo(epsilon=12.5),
    }
    configs = {method: published(f"qwen3_{size}_{method}") for method in expected}
    for method, config in configs.items():
        algorithm = config.algorithm
        assert algorithm.surrogate == expected[method]
        assert (algorithm.advantage.scale, algorithm.proximal) == ("none", "behavior")
        assert algorithm.aggregate == SUMMED[size]
        for section in ("model", "task", "reward", "sampling", "train", "eval", "data"):
            assert getattr(config, section) == getattr(configs["grpo"], section)
    train, sampling = configs["grpo"].train, configs["grpo"].sampling
    batch = {"4b": (64, 8, 4, 8192), "30b": (256, 16, 4, 16384)}[size]
    assert (train.prompts_per_step, train.completions_per_prompt, train.updates_per_step, sampling.max_tokens) == batch
    assert (train.optimizer.lr, train.optimizer.weight_decay) == (1e-6, 0.01)
    assert (train.steps, train.schedule) == (800, "constant")


def test_segment_wise_decoupled_ppo_differs_from_its_baseline_alone():
    config, base = published("gsm8k_grpo_sdp"), published("gsm8k")
    for section in ("model", "task", "sampling"):
        assert getattr(config, section) == getattr(base, section)
    assert config.train.steps == 10 * (7473 // config.train.prompts_per_step)
    twin = published("cpu/sdp")
    assert replace(config.algorithm, advantage=twin.algorithm.advantage) == twin.algorithm
    assert (twin.runtime.max_lag, twin.runtime.max_concurrent_rollouts, twin.engine.threads) == (2, 32, 1)


ASYNC = {"engine.kind": "local_process", "engine.interrupt": "finish", "engine.threads": 1, "runtime.max_lag": 2}
ASYNC |= {"runtime.max_concurrent_rollouts": 32, "runtime.threads": 1}
TOP_P = {"sampling.top_k": 512, "sampling.top_p": 0.9}
CENTERED = {"train.steps": 10, "train.warmup_steps": 2, "train.updates_per_step": 4, "eval.every": 0, "eval.limit": 100}
DIFFERENT = {  # what a small recipe says otherwise than the quickstart, beside algorithm, reward and critic
    "async": ASYNC,
    "sdp": ASYNC,
    "cppo_prune": {"train.completions_per_prompt": 16, "train.prompts_per_step": 4},
    "distill": {"train.steps": 10, "checkpoint.every": 5},
    "judge": {"train.steps": 20},
    "lora": {"model.lora.rank": 8, "model.lora.alpha": 16.0, "train.optimizer.lr": 2e-4},
    "ppo_notebook": {"train.epochs_per_step": 2, "train.target_kl": 0.05},
    "score_centering": CENTERED | {"engine.top_k_log_probs": 20},
    "top_p": TOP_P,
    "top_p_replay": TOP_P | {"engine.sampling_mask": True},
}


@pytest.mark.slow
def test_the_small_recipes_differ_from_the_quickstart_in_their_method():
    base = resolve(FOLDER / "quickstart.yaml")
    usual = leaves(base)
    assert usual["eval.limit"] >= 200 and usual["eval.task.size"] >= 200  # for an interval that says something
    for path in sorted(FOLDER.glob("cpu/*.yaml")):
        resolved = resolve(path, root=None)
        config, name = resolved.config, path.stem
        if not isinstance(config, RunConfig):
            continue
        if name in ("tools", "guess", "mix"):  # another task, of several turns
            assert sources_of(config.task)[-1].played
            assert config.model == base.config.model
            continue
        if name == "vision":  # another task and another model
            assert config.task.images and config.algorithm.preset == "cppo"
            continue
        written = {e.path: e.value for e in resolved.entries if e.origin == "file"}
        beside = {path for path in written if not path.startswith(("algorithm", "reward", "critic"))}
        own = {path: written[path] for path in beside if written[path] != usual.get(path)}
        assert own == DIFFERENT.get(name, {}), name
        method = METHODS.get(name, name).removesuffix("_tis").removesuffix("_critic")
        assert (config.algorithm.preset or "").startswith(method)
    assert published("cpu/lora").algorithm == base.config.algorithm
    replayed = [published(f"cpu/{name}").algorithm.behavior for name in ("top_p", "top_p_replay")]
    assert replayed == ["untruncated", "sampled"]


WEIGHTED = {"algorithm.correction", "algorithm.proximal"}
SIBLINGS = {  # a recipe → another one, and the slots in which they differ
    "gsm8k_cppo": ("gsm8k", {f"algorithm.{slot}" for slot in ("advantage", "aggregate", "preset", "surrogate")}),
    "dapo_32b_no_dynamic": ("dapo_32b", {f"algorithm.{slot}" for slot in ("dynamic_sampling", "preset", "selection")}),
    "dapo_32b_early": ("dapo_32b_no_dynamic", {"algorithm.aggregate"}),
    "dapo_32b_tis": ("dapo_32b", WEIGHTED),
    "cpu/dapo_tis": ("cpu/dapo", WEIGHTED),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_it_differs_from_its_sibling_in_the_method(name):
    sibling, slots = SIBLINGS[name]
    values, others = (leaves(resolve(FOLDER / f"{of}.yaml")) for of in (name, sibling))
    changed = {path for path in values.keys() | others.keys() if values.get(path) != others.get(path)}
    assert {".".join(path.split(".")[:2]) for path in changed} == slots
    algorithm = published(name).algorithm
    if slots == WEIGHTED:
        assert (algorithm.correction, algorithm.proximal) == (CORRECTION_PRESETS["decoupled_token_is"], "recompute")
    assert name != "dapo_32b_early" or algorithm.aggregate == SequenceMeanTokenMean()
