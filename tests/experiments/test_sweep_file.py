"""A sweep file becomes cells and checked runs, or lines that say what is wrong with it."""

from pathlib import Path

import pytest

from proxima.config.problems import ConfigError
from proxima.config.resolved import dump
from proxima.core import PpoClip
from proxima.experiments import sweep_plan
from proxima.experiments.sweep_file import read_sweep
from proxima.experiments.sweep_plan import plan_runs
from tests.refusals import refused


def test_a_grid_is_the_product_of_its_axes(sweep_file):
    sweep = read_sweep(
        sweep_file("seeds: [3, 1]\ngrid: {algorithm: [grpo, dppo], train.optimizer.lr: [1e-5, 3e-05]}\n")
    )
    assert [cell.name for cell in sweep.cells] == [
        "algorithm=grpo,lr=1e-5",
        "algorithm=grpo,lr=3e-05",
        "algorithm=dppo,lr=1e-5",
        "algorithm=dppo,lr=3e-05",
    ]
    assert (sweep.folder, sweep.seeds, sweep.jobs) == (Path("runs/mine"), (3, 1), 1)
    runs = plan_runs(sweep)
    assert [(run.cell, run.seed) for run in runs[:4]] == [
        (cell.name, 3) for cell in sweep.cells
    ]  # a whole comparison comes first
    last = runs[-1]
    assert str(last.folder) == "runs/mine/algorithm=dppo,lr=3e-05/seed-1"
    config = last.resolved.config
    assert (config.seed, config.folder) == (1, str(last.folder))
    assert (config.algorithm.preset, config.train.optimizer.lr) == ("dppo", 3e-5)
    assert (last.steps, last.threads) == (2, None)


def test_layers_lie_over_each_other_as_in_recipes(sweep_file):
    text = """\
set:
  {train.steps: 5, train.completions_per_prompt: 4, algorithm.surrogate: {kind: cppo, delta: 0.3},
   reward: {kind: number, weight: 2}}
grid: {train.prompts_per_step: [4]}
cells:
  plain:
  ppo: {algorithm: {surrogate: {kind: ppo_clip, epsilon_high: 0.28}}, train: {steps: 7}}
  weighed: {reward.0.weight: 0.5}
"""
    runs = {run.cell: run.resolved.config for run in plan_runs(read_sweep(sweep_file(text)))}
    assert list(runs) == [f"{name},prompts_per_step=4" for name in ("plain", "ppo", "weighed")]
    plain, ppo, weighed = runs.values()
    assert (plain.train.steps, plain.train.completions_per_prompt, plain.train.prompts_per_step) == (5, 4, 4)
    assert (plain.algorithm.surrogate.delta, plain.reward[0].weight) == (0.3, 2)
    assert ppo.algorithm.surrogate == PpoClip(epsilon_high=0.28)  # delta went with cppo
    assert (ppo.train.steps, ppo.train.completions_per_prompt) == (7, 4)
    assert weighed.reward[0].weight == 0.5


def test_values_of_all_kinds_reach_the_config(sweep_file):
    text = """\
cells:
  a:
    algorithm.selection: [drop_uniform_groups, {kind: prune, rate: 0.5}]
    algorithm.surrogate.delta: .inf
    eval.task: null
    sampling.stop: ["a: b", "é"]
"""
    (run,) = plan_runs(read_sweep(sweep_file(text)))
    config = run.resolved.config
    assert [type(spec).__name__ for spec in config.algorithm.selection] == ["DropUniformGroups", "Prune"]
    assert list(config.sampling.stop) == ["a: b", "é"]
    assert config.algorithm.surrogate.delta == float("inf")


def test_names_are_short_safe_and_unambiguous(sweep_file):
    text = (
        "grid: {train.steps: [3], sampling.max_tokens: [4], model.path: ['a/b c'], algorithm.advantage: [{kind: "
        "rloo}, grpo]}\n"
    )
    names = [cell.name for cell in read_sweep(sweep_file(text)).cells]
    assert names == ["steps=3,max_tokens=4,path=a_b_c,advantage=rloo", "steps=3,max_tokens=4,path=a_b_c,advantage=grpo"]
    same_end = "grid: {task.size: [3], eval.limit: [4], eval.task: [{kind: arithmetic, size: 5}]}\n"
    (cell,) = read_sweep(sweep_file(same_end)).cells
    assert cell.name == "size=3,limit=4,task=arithmetic-size=5"
    (long,) = read_sweep(sweep_file(f"grid: {{data.system: [{'x' * 300}]}}\n")).cells
    assert len(long.name) == 120
    (only,) = read_sweep(sweep_file("seeds: [1]\n")).cells
    assert only.name == "tiny"


def test_threads_are_shared_unless_they_are_said(sweep_file, monkeypatch):
    monkeypatch.setattr(sweep_plan, "usable_cores", lambda: 8)
    file = sweep_file("jobs: 2\ncells: {a: , b: {runtime.threads: 3}}\n")
    assert [run.threads for run in plan_runs(read_sweep(file))] == [4, 3]
    assert [run.threads for run in plan_runs(read_sweep(file, jobs=16))] == [1, 3]
    assert [run.threads for run in plan_runs(read_sweep(file, jobs=1))] == [None, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [run.resolved.config.runtime.threads for run in plan_runs(read_sweep(file))] == [2, 3]


def test_only_some_cells(sweep_file):
    file = sweep_file("grid: {algorithm: [grpo, cppo], train.steps: [1, 2]}\n")
    sweep = read_sweep(file, only=["*steps=2"])
    assert [cell.name for cell in sweep.cells] == ["algorithm=grpo,steps=2", "algorithm=cppo,steps=2"]
    assert len(sweep.all_cells) == 4
    (line,) = refused(read_sweep, file, only=["algorithm=grpo,steps=3"])
    assert "--only: 'algorithm=grpo,steps=3' matches no cell; did you mean 'algorithm=grpo,steps=" in line


def test_the_recipe_is_looked_for_beside_the_sweep_first(sweep_file, tmp_path):
    file = sweep_file("seeds: [1]\n")
    (tmp_path / "below").mkdir()
    moved = file.rename(tmp_path / "below" / "mine.yaml")
    assert read_sweep(moved).recipe == Path("tiny.yaml")
    (tmp_path / "below" / "tiny.yaml").write_text("{}")
    assert read_sweep(moved).recipe == tmp_path / "below" / "tiny.yaml"


def test_every_fault_of_the_file_is_said_at_once(sweep_file):
    text = """\
recipes: x.yaml
seeds: [1, 1]
jobs: 0
set: {seed: 3, trian.steps: 4}
grid: {train.steps: 3, algorithm: []}
cells: {a/b: {folder: x}}
"""
    assert refused(read_sweep, sweep_file(text, head="")) == [
        "recipes=x.yaml (mine.yaml:1): a sweep has no field 'recipes'; did you mean 'recipe'?",
        "recipe: must be the path or name of a recipe: recipe: quickstart",
        "seeds=[1, 1] (mine.yaml:2): repeats a seed, which would repeat the run; keep one",
        "jobs=0 (mine.yaml:3): is 0; must be a whole number >= 1: how many runs run at a time",
        "set.seed=3 (mine.yaml:4): is set by the sweep: use seeds: [1, 2, 3]",
        "set.trian.steps=4 (mine.yaml:4): a recipe has no field 'trian'; did you mean 'train'?",
        "grid.train.steps=3 (mine.yaml:5): must be a list of values with at least one: [1e-5, 3e-5]",
        "grid.algorithm=[] (mine.yaml:5): must be a list of values with at least one: [1e-5, 3e-5]",
        "cells.a/b={folder: x} (mine.yaml:6): can't name a folder; use letters, digits and . _ - = + , and "
        "start with neither . nor -",
        "cells.a/b.folder=x (mine.yaml:6): is set by the sweep: each run gets one below the sweep's own",
    ]


@pytest.mark.parametrize("text", ["seeds: 3\n", "seeds: []\n", "seeds: [1.5]\n", "seeds: [true]\n", "seeds: [-1]\n"])
def test_seeds_are_whole_numbers(sweep_file, text):
    (line,) = refused(read_sweep, sweep_file(text))
    assert "must be a list of whole numbers" in line


def test_a_missing_file_or_recipe(sweep_file):
    assert refused(read_sweep, "none.yaml")[0].startswith("none.yaml: does not exist; give the path of a YAML file")
    (line,) = refused(read_sweep, sweep_file("", head="recipe: gone.yaml\n"))
    where = "not found beside mine.yaml, in the current folder or in `proxima list recipes`"
    assert line.startswith("recipe=gone.yaml ") and where in line


def test_two_cells_may_not_share_a_folder(sweep_file):
    with pytest.raises(ConfigError, match="two cells have the name 'system=a_b'"):
        read_sweep(sweep_file("grid: {data.system: ['a b', 'a/b']}\n"))


def test_faults_of_configs_name_cells_and_the_line_of_the_sweep(sweep_file):
    text = """\
seeds: [1, 2]
set: {sampling.temperature: 0}
grid:
  algorithm: [grpo, cppo]
  train.optimizer.lr: [1e-5, -1]
cells:
  a: {algorithm.surrogate.detla: 1}
  b:
"""
    lines = refused(plan_runs, read_sweep(sweep_file(text)))
    assert len(lines) == len(set(lines)) == 4
    cells = "cells b,algorithm=grpo,lr=1e-5 and b,algorithm=cppo,lr=1e-5"
    said = [f"{cells}: sampling.temperature=0 (mine.yaml:3): training needs samples"]
    said += [": train.optimizer.lr=-1 (mine.yaml:6): must be >= 0"]
    said += ["(mine.yaml:8): 'cppo' has no field 'detla'; did you mean 'delta'?"]
    assert all(any(part in line for line in lines) for part in said), lines


def test_what_is_wrong_with_the_recipe_is_said_once(sweep_file):
    sweep = read_sweep(sweep_file("seeds: [1, 2]\nset: {train.steps: 0}\ngrid: {algorithm: [grpo, cppo]}\n"))
    assert refused(plan_runs, sweep) == ["every cell: train.steps=0 (mine.yaml:3): must be >= 1"]


@pytest.mark.slow
def test_a_run_of_another_config_is_not_gone_on_with(sweep_file):
    file = sweep_file("seeds: [1, 2]\ngrid: {algorithm: [grpo, cppo]}\n")
    for run in plan_runs(read_sweep(file)):
        run.folder.mkdir(parents=True)
        (run.folder / "config.yaml").write_text(dump(run.resolved))
    assert len(plan_runs(read_sweep(file, jobs=2))) == 4  # other threads are no other config
    other = sweep_file("seeds: [2]\nset: {train.optimizer.lr: 2e-4}\ngrid: {algorithm: [cppo]}\n")
    (line,) = refused(plan_runs, read_sweep(other))
    differs = "holds a run of another config: train.optimizer.lr is 0.0001 there and 0.0002 here"
    remedy = "put it back, use another --folder, or delete this one to start over"
    assert line == f"runs/mine/algorithm=cppo/seed-2: {differs}; {remedy}"
    assert len(plan_runs(read_sweep(other, folder="runs/other"))) == 1
    Path("runs/mine/algorithm=cppo/seed-2/config.yaml").write_text("nonsense: 3\n")
    with pytest.raises(ConfigError, match="holds a run whose config this version can't read"):
        plan_runs(read_sweep(other))
