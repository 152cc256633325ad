"""What no single field can see, as a user types it: one line with the remedy, before anything is loaded."""

import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest

from proxima.config import sections, validate
from proxima.config.describe import fields_of
from proxima.config.families import FAMILIES
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import Findings, dump
from proxima.config.validate import CHECKS, PROOFS, WARNINGS, check, load_recipe, to_do, warnings
from proxima.data import FieldError, FieldErrors
from proxima.data.errors import within
from proxima.task.local_files import Jsonl
from proxima.task.opening import open_tasks
from tests.config.conftest import BASE


def problems(recipe, *overrides):
    return [str(problem) for problem in check(resolve(recipe(), list(overrides)))]


def test_the_smallest_recipe_passes(recipe):
    assert problems(recipe) == []
    assert load_recipe(recipe()).config.model.path == "org/model"


@pytest.mark.parametrize(
    ("words", "path", "package", "extra"),
    [
        (["train.optimizer=adamw_8bit"], "train.optimizer.kind=adamw_8bit", "torchao", "low-bit"),
        (
            ["algorithm=ppo", "critic=model", "critic.optimizer=adamw_8bit"],
            *("critic.optimizer.kind=adamw_8bit", "torchao", "low-bit"),
        ),
        (["placement=ray"], "placement.kind=ray", "ray", "ray"),
        (["model.lora={rank: 4}"], "model.lora.rank=4", "peft", "lora"),
        (["reward=[number, math]"], "reward.1.kind=math", "math_verify", "math"),
        (["reward={kind: reasoning_gym, name: puzzle}"], "reward.0.kind=reasoning_gym", "reasoning_gym", "gym"),
        (["task={kind: dataset, path: a/b}"], "task.kind=dataset", "datasets", "data"),
        (["eval.task=shapes"], "eval.task.kind=shapes", "PIL", "images"),
        (
            ["task={kind: arithmetic, environment: {kind: search, corpus: a}}", "episode.tokens=300"],
            "task.environment={kind: search, corpus: a}",
            "bm25s",
            "search",
        ),
    ],
)
def test_a_package_that_is_missing_is_named(recipe, monkeypatch, words, path, package, extra):
    find_spec = importlib.util.find_spec
    for there, lines in (
        (object(), []),
        (None, [f"needs the package {package.replace('_', '-')}: pip install 'proxima-rl[{extra}]'"]),
    ):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a, there=there: there if name == package else find_spec(name, *a)
        )
        said = [problem for problem in problems(recipe, *words) if "package" in problem]
        assert [problem.partition("(command line): ")[2] for problem in said] == lines
        assert all(path is None or problem.startswith(f"{path} (command line): ") for problem in said)


def test_a_task_that_is_played_by_default_is_checked(recipe):
    words = ("task={kind: tests.config.fakes:PlayedSums}", "episode.tokens=3", "sampling.max_tokens=6")
    assert "episode.tokens=3 (command line): is less than one turn may have" in " ".join(problems(recipe, *words))


def test_a_placeholder_is_refused(recipe):
    name = recipe(BASE.replace("reward: number", "reward: math  # TO FILL IN: which one"))
    line = (
        "reward.0.kind=math (run.yaml:3, TO FILL IN): is a placeholder for a value that you have to fill in (which "
        "one); set it and remove the comment, or reward.0.kind=… on the command line"
    )
    resolved = resolve(name)
    assert [str(problem) for problem in check(resolved)] == [line]
    assert line in [str(problem) for problem in (*warnings(resolved), *to_do(resolved))]
    assert check(resolve(recipe(dump(resolved), "again.yaml")))
    assert check(resolve(name, ["reward.0.kind=math"])) == []
    overridden = resolve(recipe(dump(resolve(name, ["reward.0.kind=math"])), "run/config.yaml"))
    assert check(overridden) == []


SUMS = "{kind: arithmetic, split: %s, held_out: %s, size: 10}"


@pytest.mark.parametrize(
    ("trained", "asked", "apart"),
    [
        (("train", 0.2), ("test", 0.2), True),
        (("train", 0.3), ("test", 0.2), True),
        (("train", 0.1), ("test", 0.2), False),
        (("train", 0.2), ("train", 0.2), False),
        (("test", 0.2), ("train", 0.3), True),
        (("test", 0.3), ("train", 0.2), False),
        (("test", 0.2), ("test", 0.1), False),
    ],
)
def test_sides_of_a_split_that_meet(trained, asked, apart, recipe):
    """Sizes differ, so the tasks do; the questions are the same all the same."""
    overrides = [f"task={SUMS % trained}".replace("10", "90"), f"eval.task={SUMS % asked}"]
    resolved = resolve(recipe(), overrides)
    lines = [str(problem) for problem in warnings(resolved)]
    assert len(lines) == (0 if apart else 1) and all("training uses some of its questions" in line for line in lines)
    sides = [
        set(task._questions("+", 1)) for task in (resolved.config.task, resolved.config.eval.task)
    ]  # all there are
    assert sides[0].isdisjoint(sides[1]) == apart


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        (["train.warmup_ratio=0.1"], 10),
        (["train.warmup_ratio=0.07"], 7),  # 0.07 * 100 is a little above 7 in binary
        (["train.warmup_ratio=0.071"], 8),
        (["train.warmup_steps=3"], 3),
    ],
)
def test_a_warm_up_is_a_number_or_a_share_of_the_updates(recipe, overrides, updates):
    assert resolve(recipe(), overrides).config.train.warmup_of(100) == updates


def test_a_function_without_its_file_is_a_warning_without_imports(recipe):
    Path("here.py").touch()
    for path in ("./here.py:f", "./gone.py:f", "no.such:f"):
        words = ["task=arithmetic", f"reward={{kind: function, path: {path}}}"]
        problems = warnings(resolve(recipe(), words, import_code=False))
        line = f"reward.0.path={path} (command line): no such file or module; a path is relative to the current folder"
        assert [str(problem) for problem in problems] == [line] * (path != "./here.py:f")


@pytest.mark.parametrize("section", ["task", "eval.task"])
def test_an_absent_column_is_named_by_its_field(recipe, section):
    Path("a.jsonl").write_text('{"question": "?", "gold": 1}\n')
    table = "{kind: jsonl, path: a.jsonl, answer: truth}"
    resolved = resolve(recipe(BASE.replace("{kind: tests.config.fakes:Sums}", table) + f"eval: {{task: {table}}}\n"))
    with pytest.raises(ConfigError) as caught, resolved.locating(), within(section):
        resolved.get(section).rows(0)
    place = "run.yaml:2" if section == "task" else "run.yaml:5"
    assert str(caught.value) == (
        f"{section}.answer=truth ({place}): names no column: a.jsonl:1 has no column 'truth'; set it to one that "
        "exists, or null for no answers; columns: question, gold"
    )
    (line,) = [str(problem) for problem in warnings(resolved)]
    assert "so it measures training data; name another file with eval.task.path" in line


def test_absent_columns_of_all_data_are_named_together(recipe):
    """Those of training and held-out data, and several of one file; one alone is as before."""
    for name in ("train", "held"):
        Path(f"{name}.jsonl").write_text('{"query": "?", "gold": 1}\n')
    tasks = {"task": Jsonl(path="train.jsonl", answer="truth"), "eval.task": Jsonl(path="held.jsonl", answer=None)}
    text = BASE.replace("{kind: tests.config.fakes:Sums}", "{kind: jsonl, path: train.jsonl, answer: truth}")
    resolved = resolve(recipe(text + "eval: {task: {kind: jsonl, path: held.jsonl, answer: null}}\n"))
    with pytest.raises(ConfigError) as caught, resolved.locating():
        open_tasks(tasks, seed=0)
    values = [(problem.path, problem.source) for problem in caught.value.problems]
    assert values == [("task.question", "default"), ("task.answer", "run.yaml:2"), ("eval.task.question", "default")]
    with pytest.raises(
        FieldErrors, match="task.question='question' names no column.*\ntask.answer=.*\neval.task.quest"
    ):
        open_tasks(tasks, seed=0)
    with pytest.raises(FieldError, match="^eval.task.question='question' names no column"):
        open_tasks({"eval.task": tasks["eval.task"]}, seed=0)


ALL = [*CHECKS, *PROOFS, *WARNINGS]


def test_every_check_names_sections_that_exist():
    """One that is misspelt would never run."""
    fields = {info.name for family in FAMILIES.values() for info in fields_of(family.root)}
    unknown = {
        f"{check.__name__}({name})"
        for check in ALL
        for name in inspect.signature(check).parameters
        if name not in {"r", *fields}
    }
    assert unknown == set()


def test_every_check_is_listed_once():
    listed = [check.__name__ for check in ALL]
    names = [module.name for module in pkgutil.iter_modules(sections.__path__)]
    places = [validate, *(importlib.import_module(f"{sections.__name__}.{name}") for name in names)]
    written = {
        name
        for place in places
        for name, value in vars(place).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__annotations__.get("return") == Findings
    }
    assert len(listed) == len(set(listed)) and set(listed) == written


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("task: {kind: jsonl, path: rows.jsonl}", "rows.jsonl"),
        ("task: {kind: jsonl, path: 'row*.jsonl'}", "'row*.jsonl'"),
        ("reward: {kind: function, path: './graded.py:score'}", "graded.py"),
        ("reward: {kind: function, path: 'graded:score'}", "graded.py"),
        ("reward: {kind: 'graded:Score'}", "graded.py"),
        ("model: {path: models/mine}", "models/mine"),
    ],
)
def test_a_path_that_is_in_the_recipes_folder_is_pointed_out(tmp_path, monkeypatch, override, place):
    folder = tmp_path / "mine"
    (folder / "models" / "mine").mkdir(parents=True)
    (folder / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (folder / "graded.py").write_text("def score(completion, answer):\n    return 1.0\n")
    (folder / "base.yaml").write_text("model: {path: org/model}\ntask: arithmetic\nreward: number\nalgorithm: grpo\n")
    (folder / "my.yaml").write_text(f"extends: base.yaml\n{override}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolved = load_recipe("mine/my.yaml")
        with resolved.locating(), within("task"):
            resolved.config.task.rows(0)
    (line,) = str(caught.value).splitlines()
    there = f"mine/{place.strip(chr(39))}"
    assert line.endswith(f"; there is {there}: cd mine first, or write a path from the current folder")
    monkeypatch.chdir(folder)
    assert "cd " not in str(ConfigError(caught.value.problems))


LISTS = """
def shortest(completions, **columns):
    return [float(len(one) == min(map(len, completions))) for one in completions]
"""
STOPS = ["algorithm.advantage=grpo", "algorithm.selection=[{kind: prune, stop: true, reward_range: [0, 1]}]"]


def test_a_function_that_gets_the_whole_group_can_not_be_asked_before_the_others_have_ended(recipe):
    """Alone, each completion would be the shortest of its group."""
    name = recipe()
    recipe(LISTS, "lists.py")
    recipe("def even(prompt, completion):\n    return len(completion.tokens) % 2\n", "one.py")
    refused = check(resolve(name, [*STOPS, "reward=[{kind: function, path: 'lists.py:shortest'}]"]))
    assert [problem.path for problem in refused] == ["algorithm.selection.0.stop"]
    assert not check(resolve(name, [*STOPS, "reward=[{kind: function, path: 'one.py:even'}]"]))


def test_a_replay_keeps_what_the_stored_groups_were_stopped_for(recipe):
    """Whatever was stopped has no reward: another selection or centre would rank groups of which a part is missing."""
    name = recipe()
    recipe(dump(resolve(name, STOPS)), "before/config.yaml")
    replay = ["rollouts=before", "folder=after"]

    def refused(*changed):
        return any("were stopped" in str(problem) for problem in check(resolve(name, [*replay, *changed])))

    assert not refused(*STOPS) and not refused(STOPS[1], "algorithm.advantage=rloo")
    assert refused(STOPS[0]) and refused(STOPS[0], STOPS[1].replace("stop", "rate: 0.25, stop"))
    assert refused(STOPS[1], "algorithm.advantage=opo")
