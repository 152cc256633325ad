"""From layers to a RunConfig: values, where they came from, and what is said about wrong ones."""

import pytest
import yaml

from proxima.config.describe import fields_of, kinds_of
from proxima.config.families import FAMILIES
from proxima.config.presets import ALGORITHMS
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.schema import RunConfig
from proxima.core import CORRECTION_PRESETS, Cppo, Drpo
from proxima.core.advantage.group import Grpo
from proxima.core.aggregate import SequenceMeanTokenMean, TokenMean
from proxima.core.selection.dropping import DropUniformGroups
from proxima.data import FieldError, UserError, within
from tests.config.conftest import BASE
from tests.refusals import refused


def lines(recipe, *overrides, text=BASE):
    return refused(resolve, recipe(text), list(overrides))


def sources(resolved, prefix=""):
    return {entry.path: entry.source for entry in resolved.entries if entry.path.startswith(prefix)}


def test_every_value_knows_where_it_came_from(recipe):
    recipe(BASE + "train: {steps: 40, optimizer: {lr: 1e-5}}\n", "recipes/gsm8k.yaml")
    recipe("extends: gsm8k.yaml\nalgorithm: cppo\ntrain:\n  steps: 50\n", "recipes/gsm8k_cppo.yaml")
    resolved = resolve("recipes/gsm8k_cppo.yaml", ["algorithm.surrogate.delta=0.2", "train.optimizer.lr=2e-5"])
    origins = sources(resolved)
    assert origins["algorithm.surrogate.kind"] == "preset cppo, chosen in recipes/gsm8k_cppo.yaml:2"
    assert origins["algorithm.surrogate.delta"] == "command line, over 0.15 of the preset"
    assert origins["algorithm.surrogate.w_min"] == "preset cppo"
    assert origins["algorithm.surrogate.budget"] == "default"
    assert origins["train.steps"] == "recipes/gsm8k_cppo.yaml:4, over 40 of recipes/gsm8k.yaml:5"
    assert origins["train.optimizer.lr"] == "command line, over 1e-5 of recipes/gsm8k.yaml:5"
    assert origins["train.optimizer.kind"] == "default"
    assert origins["model.path"] == "recipes/gsm8k.yaml:1"
    assert resolved.config.algorithm.surrogate.delta == 0.2
    assert resolved.config.train.optimizer.lr == 2e-5


def test_a_kind_over_that_of_a_preset_drops_what_was_written_beside_it(recipe):
    name = recipe(BASE.replace("algorithm: cppo", "algorithm: {preset: cppo, surrogate: {delta: .2}}"))
    kept = resolve(name, ["algorithm.surrogate.w_min=0.9"]).config.algorithm.surrogate
    assert kept == Cppo(delta=0.2, w_min=0.9)
    assert resolve(name, ["algorithm.surrogate.kind=drpo"]).config.algorithm.surrogate == Drpo()


def test_an_algorithm_may_be_written_out(recipe):
    slots = "{surrogate: ppo_clip, selection: [drop_uniform_groups], reference_kl: {kind: k3, coefficient: .04}}"
    text = BASE.replace("algorithm: cppo", f"algorithm: {slots}")
    algorithm = resolve(recipe(text)).config.algorithm
    assert (algorithm.preset, algorithm.advantage, algorithm.aggregate) == (None, Grpo(), TokenMean())
    assert algorithm.selection == (DropUniformGroups(),)
    assert algorithm.reference_kl.coefficient == 0.04


def test_what_peers_call_an_aggregation(recipe):
    resolved = resolve(recipe(), ["algorithm.aggregate=seq-mean-token-mean"])
    assert resolved.config.algorithm.aggregate == SequenceMeanTokenMean()
    assert resolved.entry("algorithm.aggregate").value == "sequence_mean_token_mean"


def test_evaluation_is_greedy_and_takes_the_rest_from_training(recipe):
    text = BASE + 'sampling: {max_tokens: 12, stop: ["\\n"], temperature: 0.7}\neval: {task: tests.config.fakes:Sums}\n'
    resolved = resolve(recipe(text))
    sampling = resolved.config.eval.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.0, 12, ("\n",))
    assert sources(resolved)["eval.sampling.max_tokens"] == "as sampling.max_tokens"
    sampling = resolve(
        recipe(text), ["eval.sampling.max_tokens=99", "eval.sampling.temperature=1"]
    ).config.eval.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1.0, 99, ("\n",))


def test_an_unknown_kind_with_no_near_name_lists_them_all(recipe):
    (line,) = lines(recipe, "task.kind=xyz")
    assert line.startswith("task.kind=xyz (command line): no task 'xyz'; known: arithmetic, ")
    assert line.endswith("shapes, or package.module:Class")


def test_a_missing_part_is_named_with_its_meaning(recipe):
    assert lines(recipe, text="model: {path: a/b}\ntask: tests.config.fakes:Sums\n") == [
        "reward: is missing: named scores, each with a weight; set it in the recipe, or reward=… on the command line",
        "algorithm: is missing: a preset's name, or its slots; set it in the recipe, or algorithm=… on the command "
        "line",
    ]


def test_all_problems_come_at_once_with_file_and_line(recipe):
    text = BASE + "train:\n  steps: many\n  stepz: 3\nsampling:\n  temperature: true\nseed: 1.5\n"
    assert lines(recipe, text=text) == [
        "seed=1.5 (run.yaml:10): must be a whole number",
        "sampling.temperature=true (run.yaml:9): must be a number",
        "train.stepz=3 (run.yaml:7): 'train' has no field 'stepz'; did you mean 'steps'?",
        "train.steps=many (run.yaml:6): must be a whole number",
    ]


@pytest.mark.parametrize(
    ("section", "error", "line"),
    [
        ("task", FieldError("high", 20, "gives only 3"), "task.high=20 (command line): gives only 3"),
        ("task", FieldError("high", 20, "is too low", remedy="take 30"), None),
        ("model", FieldError("path", "x", "can't be read"), "model.path=org/model (run.yaml:1): can't be read"),
        ("eval.task", FieldError("high", 20, "is bad"), "eval.task.high=30 (command line): is bad"),
        ("model", FieldError("path.part", 1, "is bad"), "model.path.part=1 (run.yaml:1): is bad"),
    ],
)
def test_a_late_field_error_gets_its_path_and_origin(recipe, section, error, line):
    resolved = resolve(recipe(), ["task.high=20", "eval.task.kind=tests.config.fakes:Sums", "eval.task.high=30"])
    with pytest.raises(ConfigError) as caught, resolved.locating(), within(section):
        raise error
    assert str(caught.value) == (line or "task.high=20 (command line): is too low; take 30")


def test_what_is_no_field_of_the_config_passes_unchanged(recipe):
    resolved = resolve(recipe(), ["task.high=20"])
    for error in (FieldError("high", 20, "is bad"), UserError("high=20: is bad"), ValueError("task.high=20 is bad")):
        with pytest.raises(ValueError) as caught, resolved.locating():
            raise error
        assert caught.value is error


def test_a_list_preset_is_written_out_with_its_name(recipe):
    presets = ["algorithm.correction=decoupled_token_is", "algorithm.correction=[decoupled_token_is]"]
    for override in presets:
        resolved = resolve(recipe(), [override])
        assert resolved.config.algorithm.correction == CORRECTION_PRESETS["decoupled_token_is"]
        origins = sources(resolved, "algorithm.correction.0.")
        assert origins.pop("algorithm.correction.0.kind") == "preset decoupled_token_is, chosen in command line"
        assert "preset decoupled_token_is" in origins.values()
    resolved = resolve(
        recipe(BASE.replace("algorithm: cppo", "algorithm: {preset: cppo, correction: decoupled_token_is}"))
    )
    assert resolved.config.algorithm.correction == CORRECTION_PRESETS["decoupled_token_is"]
    assert resolve(yaml.safe_load(dump(resolved))).config == resolved.config


def test_a_list_preset_can_be_changed_and_extended(recipe):
    base = recipe(BASE.replace("algorithm: cppo", "algorithm: {preset: cppo, correction: decoupled_token_is}"))
    resolved = resolve(base, ["algorithm.correction.0.upper=3"])
    assert resolved.config.algorithm.correction[0].upper == 3
    assert resolved.entry("algorithm.correction.0.upper").source.startswith("command line, over ")
    several = resolve(base, ["algorithm.correction=[decoupled_token_is, {kind: rejection}]"]).config.algorithm
    assert len(several.correction) == len(CORRECTION_PRESETS["decoupled_token_is"]) + 1


@pytest.mark.parametrize("preset", sorted(ALGORITHMS))
def test_every_preset_resolves(recipe, preset):
    teacher = ["algorithm.distillation.path=models/a-teacher"] if "distillation" in ALGORITHMS[preset] else []
    resolved = resolve(recipe(), [f"algorithm={preset}", *teacher])
    assert resolved.config.algorithm.preset == preset
    written = {f"algorithm.{slot}" for slot in ALGORITHMS[preset]}
    assert all(any(e.path.startswith(w) and e.origin == "preset" for e in resolved.entries) for w in written)


def every_field(cls=RunConfig, path=""):
    for info in fields_of(cls):
        yield f"{path}{info.name}", info
        if info.slot:
            for kind, spec in kinds_of(info.slot).items():
                if f"({kind})." not in path:  # a mix of tasks may hold another
                    yield from every_field(spec, f"{path}{info.name}({kind}).")
        elif info.section is not None:
            yield from every_field(info.section, f"{path}{info.name}.")


def test_every_field_says_what_it_means():
    fields = [pair for family in FAMILIES.values() for pair in every_field(family.root)]
    assert [path for path, info in fields if not info.help] == []


def test_a_tilde_is_the_home_folder_in_every_path(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    files = "task={kind: jsonl, path: [~/a.jsonl, b.jsonl]}"
    rest = ["folder=~/runs/one", "data.system=~/no path"]
    resolved = resolve(recipe(), ["model.path=~/models/m", files, *rest])
    config = resolved.config
    assert (config.model.path, config.folder) == ("/home/ada/models/m", "/home/ada/runs/one")
    assert config.task.path == ("/home/ada/a.jsonl", "b.jsonl")
    assert config.data.system == "~/no path"
    assert resolved.entry("model.path").value == "/home/ada/models/m"  # what config.yaml records


ONE = "model: {path: org/model}\ntask: tests.config.fakes:Sums\nalgorithm: cppo\nreward: {kind: number, weight: 0.5}\n"


def test_fields_of_the_one_reward_need_no_index(recipe):
    name = recipe(ONE)
    (reward,) = resolve(name, ["reward.weight=2", "reward.name=sums"]).config.reward
    assert (reward.kind, reward.weight, reward.name) == ("number", 2, "sums")
    (reward,) = resolve(name, ["reward.kind=exact", "reward.name=other"]).config.reward
    assert (reward.kind, reward.weight, reward.name) == ("exact", 1, "other")


def test_an_evaluation_taken_away_is_not_asked_for(recipe):
    name = recipe(f"{ONE}eval: {{every: 2, task: tests.config.fakes:Sums}}\n")
    resolved = resolve(name, ["eval.task=null"])
    assert resolved.config.eval.every == 0
    assert resolved.entry("eval.every").source == "command line, eval.task=null, over 2 of run.yaml:5"
    assert resolve(name, ["eval.task=null", "eval.every=3"]).config.eval.every == 3


def test_a_file_over_the_recipe_and_values_over_both(recipe, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("train: {steps: 7, prompts_per_step: 4}\nplacement: {kind: ray, ranks: 8}\n")
    resolved = resolve(recipe(), ["train.steps=9", f"@{cluster}"])
    assert (resolved.config.train.steps, resolved.config.train.prompts_per_step) == (9, 4)
    assert resolved.config.placement.ranks == 8
    assert sources(resolved, "placement.ranks")["placement.ranks"].endswith("cluster.yaml:2")
