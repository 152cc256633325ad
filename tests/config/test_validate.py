"""What no single field can see, as a user types it: one line with the remedy, before anything is loaded."""

import importlib
import inspect
import json
import os
import pkgutil
from pathlib import Path

import pytest
import torch

from proxima.config import ConfigError, check, dump, load_recipe, resolve, sections, validate
from proxima.config.describe import fields_of
from proxima.config.explanation import config_remarks
from proxima.config.families import FAMILIES
from proxima.config.resolved import Findings
from proxima.config.validate import CHECKS, WARNINGS, IfSet, warnings
from proxima.data import FieldError, FieldErrors
from proxima.data.errors import within
from proxima.task import Jsonl
from proxima.task.protocol import open_tasks
from proxima.train.optimizer import AdamW
from tests.config.conftest import BASE

ELSEWHERE = "tests.config.fakes"


def problems(recipe, *overrides):
    return [str(problem) for problem in check(resolve(recipe(), list(overrides)))]


def test_the_smallest_recipe_passes(recipe):
    assert problems(recipe) == []
    assert load_recipe(recipe()).config.model.path == "org/model"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["task={kind: arithmetic}", "reward=[{kind: environment}]"],
            "reward.0.kind=environment (command line): scores by the environment of task, which has none; set "
            "task.environment, or name another reward",
        ),
        (
            ["task={kind: arithmetic, environment: calculator}", "episode.tokens=5", "sampling.max_tokens=9"],
            "episode.tokens=5 (command line): is less than one turn may have, sampling.max_tokens=9; raise it, or "
            "lower sampling.max_tokens",
        ),
        (
            ["sampling.temperature=0"],
            "sampling.temperature=0 (command line): training needs samples, 0 is greedy; set it > 0, evaluation is "
            "greedy by default",
        ),
        (
            ["algorithm=online_dpo", "algorithm.reference_kl=k3"],
            "algorithm.reference_kl.kind=k3 (command line): has no effect in online DPO; set "
            "algorithm.reference_kl=null, or algorithm.preference=null",
        ),
        (
            ["algorithm=online_dpo", "algorithm.surrogate=cppo"],
            "algorithm.surrogate.kind=cppo (command line): has no effect in online DPO; set "
            "algorithm.surrogate=null, or algorithm.preference=null",
        ),
        (
            ["algorithm=online_dpo", "algorithm.mismatch.on_mismatch=reject"],
            "algorithm.mismatch.on_mismatch=reject (command line): would break pairs; set it to auto, warn or stop",
        ),
        (
            ["algorithm=online_dpo", "algorithm.selection=[drop_uniform_groups]"],
            "algorithm.preference.kind=sigmoid (preset online_dpo, chosen in command line): needs pairs; end "
            "algorithm.selection with {kind: best_and_worst}",
        ),
        (
            ["algorithm.behavior=sampled", "sampling.top_p=0.9"],
            "sampling.top_p=0.9 (command line): behavior=sampled compares the policy with the truncated distribution, "
            "and needs the tokens that could be sampled; "
            "set engine.sampling_mask=true, algorithm.behavior=untruncated or top_p=1.0",
        ),
        (
            ["train.completions_per_prompt=1"],
            "train.completions_per_prompt=1 (command line): a group of one has advantage 0 under 'grpo', so "
            "nothing is learned; set at least 2, usually 8",
        ),
        (
            [f"algorithm.surrogate.kind={ELSEWHERE}:NeedsTopK"],
            f"algorithm.surrogate.kind={ELSEWHERE}:NeedsTopK (command line): '{ELSEWHERE}:NeedsTopK' with these "
            "values needs "
            "the engine's top-k log-probs; set engine.top_k_log_probs=20",
        ),
        (
            ["algorithm=dppo", "algorithm.surrogate.divergence=topk_tv"],
            "algorithm.surrogate.kind=dppo (preset dppo, chosen in command line): 'dppo' with these values needs "
            "the engine's top-k log-probs; set engine.top_k_log_probs=20",
        ),
        (
            [f"algorithm.surrogate.kind={ELSEWHERE}:NeedsReference"],
            f"algorithm.surrogate.kind={ELSEWHERE}:NeedsReference (command line): '{ELSEWHERE}:NeedsReference' "
            "needs `reference_log_prob`: "
            "set algorithm.reference_kl, which loads the reference model",
        ),
        (
            ["algorithm.correction=[{kind: importance, towards: next}]"],
            "algorithm.correction.0.kind=importance (command line): 'importance' needs `next_log_prob`: "
            "set algorithm.proximal=next, in asynchronous training, or towards=proximal",
        ),
        (
            ["algorithm.proximal=next"],
            "algorithm.proximal=next (command line): no correction reads the next policy; add "
            "algorithm.correction=[{kind: cap_floor, towards: next}], or set it to recompute",
        ),
        (
            ["algorithm=sdp", "algorithm.correction=[{kind: cap_floor, towards: next}, icepop]"],
            "algorithm.correction.1.kind=icepop (command line): compares with the proximal policy, and "
            "algorithm.proximal=next is for the next one; set its towards=next, or algorithm.proximal=recompute",
        ),
        (
            ["algorithm.next_missing=drop_token"],
            "algorithm.next_missing=drop_token (command line): has no effect; set algorithm.proximal=next, or "
            "next_missing=decoupled",
        ),
        (
            ["algorithm.next_from=trainer"],
            "algorithm.next_from=trainer (command line): has no effect; set algorithm.proximal=next, or "
            "next_from=engine",
        ),
        (
            ["algorithm.selection=[{kind: prune, rate: 0.7, allocate: true}]", "train.completions_per_prompt=10"],
            "algorithm.selection.0.allocate=true (command line): a group of 10 (train.completions_per_prompt) "
            "keeps 3, not a divisor of it, so updates can't keep their size; use a rate and a group size that do, as "
            "rate 0.5, 0.75 or 0.875 with 16, or allocate=false",
        ),
        (
            ["algorithm.dynamic_sampling={exhausted: partial}"],
            "algorithm.dynamic_sampling.exhausted=partial (command line): no selection drops whole groups, so "
            "there is nothing to refill; add drop_uniform_groups to algorithm.selection, or set "
            "algorithm.dynamic_sampling=null",
        ),
        (
            ["algorithm.selection=[{kind: drop_uniform_groups, metric: acuracy}]"],
            "algorithm.selection.0.metric=acuracy (command line): unknown metric of a completion; known: acc, "
            "accuracy, length, "
            "number, reward, score, truncated",
        ),
        (
            ["model.dtype=bfloat16", "model.compute_dtype=float32"],
            "model.compute_dtype=float32 (command line): has no effect: weights in bfloat16 (model.dtype) have "
            "products in bfloat16; set both to one dtype",
        ),
        (["eval.every=5"], "eval.every=5 (command line): there is nothing to evaluate; set eval.task, or eval.every=0"),
        (
            ["checkpoint.keep_best=true"],
            "checkpoint.keep_best=true (command line): the best is found by evaluations "
            "during the run; set eval.task and eval.every, or false",
        ),
        (
            ["checkpoint.keep_best=true", f"eval.task={ELSEWHERE}:Sums"],
            "checkpoint.keep_best=true (command line): the best is found by evaluations "
            "during the run; set eval.task and eval.every, or false",
        ),
        (
            ["eval.metric=rewrd"],
            "eval.metric=rewrd (command line): an evaluation has no such metric; did you mean 'reward'?",
        ),
        (
            ["eval.metric=pass@4"],
            "eval.metric=pass@4 (command line): an evaluation has no such metric; known: acc, accuracy, length, "
            "number, reward, score, truncated, or NAME/PART for a part of a reward's own",
        ),
        (
            ["eval.metric=length", "checkpoint.keep_best=true", f"eval.task={ELSEWHERE}:Sums", "eval.every=1"],
            "eval.metric=length (command line): keep_best keeps the highest, and here that is not the best; name the "
            "accuracy, the reward or a reward",
        ),
        (
            ["model.device=gpu"],
            "model.device=gpu (command line): is not a device of proxima; write auto, cpu, cuda or cuda:1",
        ),
        (
            ["task.path=questions.jsonl"],
            "task.path=questions.jsonl (command line): no such file; give a path relative to the current folder",
        ),
        (
            ["model.max_length=100", "sampling.max_tokens=100"],
            "sampling.max_tokens=100 (command line): leaves no room for a prompt: the context is 100 tokens "
            "(model.max_length); lower it",
        ),
        (
            ["algorithm=online_dpo", "train.target_kl=0.02", "train.epochs_per_step=2"],
            "train.target_kl=0.02 (command line): online DPO measures no approximate KL of an epoch; set it to null",
        ),
        (
            ["algorithm.advantage=gdpo", "algorithm.reward_kl.coefficient=0.1"],
            "algorithm.reward_kl.coefficient=0.1 (command line): 'gdpo' reads the rewards one by one, without the KL; "
            "set algorithm.reference_kl or another advantage",
        ),
    ],
)
def test_parts_that_do_not_fit(recipe, overrides, line):
    assert problems(recipe, *overrides) == [line]


@pytest.mark.parametrize(
    "metric", ["acc", "reward", "number", "number/part", "reward/part/number", "length", "mean@4", "pass@4"]
)
def test_what_an_evaluation_has_may_be_its_metric(recipe, metric):
    assert problems(recipe, f"eval.metric={metric}", "eval.samples=4") == []


def test_an_advantage_that_the_loop_cannot_feed(recipe):
    kind = f"{ELSEWHERE}:NeedsValue"
    (line,) = problems(recipe, f"algorithm.advantage={kind}")
    assert line.startswith(
        f"algorithm.advantage.kind={kind} (command line): {kind!r} needs `value`; set critic=model or critic=head, or "
        "use one of "
    )
    assert problems(recipe, f"algorithm.advantage={ELSEWHERE}:PerToken") == []
    assert "grpo" in line
    assert "rloo" in line


def test_a_reference_penalty_supplies_the_reference(recipe):
    assert problems(recipe, f"algorithm.surrogate.kind={ELSEWHERE}:NeedsReference", "algorithm.reference_kl=k3") == []


def test_a_missing_data_file_names_the_nearest(recipe):
    recipe("{}", "data/questions.jsonl")
    (line,) = problems(recipe, "task.path=data/question.jsonl")
    assert line == (
        "task.path=data/question.jsonl (command line): no such file; did you mean data/questions.jsonl? "
        "Else give a path relative to the current folder"
    )


@pytest.mark.parametrize(
    "path",
    ["models/none", "./none", "/nowhere/none", "~/none", "a/b/c", "none", "model.gguf", "owner/with space", "here/x"],
)
def test_a_model_that_is_not_there(recipe, path):
    recipe("{}", "here/file.txt")
    (line,) = problems(recipe, f"model.path={path}")
    where = "" if path[0] in "/~" else ": a path is relative to the current folder"
    other = "; if it is a name of the hub, download it first (hf download here/x), for a folder here is here"
    path = os.path.expanduser(path)
    assert (
        line == f"model.path={path} (command line): does not exist{where}; give a folder, a .gguf file, or a hub name "
        "like Qwen/Qwen3-0.6B" + (other if path == "here/x" else "")
    )


def test_a_mistyped_model_folder_names_the_nearest(recipe):
    recipe("{}", "models/smollm2-135m-instruct/config.json")
    (line,) = problems(recipe, "model.path=models/smolm2-135m-instruct")
    assert line.startswith(
        "model.path=models/smolm2-135m-instruct (command line): does not exist: a path is relative to the "
        "current folder; "
        "did you mean models/smollm2-135m-instruct? Else give"
    )


def test_a_run_given_as_a_model_names_the_export(recipe):
    recipe("{}", "runs/a/config.yaml")
    Path("runs/a/metrics.jsonl").touch()
    assert problems(recipe, "model.path=runs/a") == [
        "model.path=runs/a (command line): is a run, not its model; `proxima export runs/a MODEL` writes it to a "
        "folder; give that"
    ]


def test_folders_and_files_that_are_no_model(recipe):
    recipe("{}", "folder/file.txt")
    assert problems(recipe, "model.path=folder") == [
        "model.path=folder (command line): is a folder without config.json; give a Hugging Face model folder or a "
        ".gguf file"
    ]
    assert problems(recipe, "model.path=folder/file.txt") == [
        "model.path=folder/file.txt (command line): is a file but not .gguf; give the folder that holds "
        "config.json, or a .gguf file"
    ]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_names(recipe, path):
    assert problems(recipe, f"model.path={path}") == []


def test_the_models_own_context_counts(recipe):
    recipe("{}", "m/x")
    Path("m/config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert problems(recipe, "model.path=m", "sampling.max_tokens=63") == []
    assert problems(recipe, "model.path=m", "sampling.max_tokens=64") == [
        "sampling.max_tokens=64 (command line): leaves no room for a prompt: the context is 64 tokens "
        "(max_position_embeddings in m/config.json); lower it"
    ]


def test_load_raises_what_check_finds(recipe):
    with pytest.raises(ConfigError, match="sampling.temperature=0"):
        load_recipe(recipe(), ["sampling.temperature=0"])


def test_a_placeholder_is_refused(recipe):
    name = recipe(BASE.replace("reward: number", "reward: math  # TO FILL IN: which one"))
    line = (
        "reward.0.kind=math (run.yaml:3, TO FILL IN): is a placeholder for a value that you have to fill in; set it "
        "and remove the comment, or reward.0.kind=… on the command line"
    )
    resolved = resolve(name)
    assert [str(problem) for problem in check(resolved)] == [line]
    assert line in [str(problem) for problem in config_remarks(resolved)]
    assert check(resolve(recipe(dump(resolved), "again.yaml")))
    assert check(resolve(name, ["reward.0.kind=math"])) == []
    overridden = resolve(recipe(dump(resolve(name, ["reward.0.kind=math"])), "run/config.yaml"))
    assert check(overridden) == []


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            [f"eval.task={ELSEWHERE}:Sums"],
            f"eval.task.kind={ELSEWHERE}:Sums (command line): has the questions of `task`",
        ),
        (["train.warmup_steps=100"], "train.warmup_steps=100 (command line): the run has 100 updates"),
        (
            ["train.tokens_per_micro_batch=8"],
            "train.tokens_per_micro_batch=8 (command line): a completion may have 256 tokens",
        ),
    ],
)
def test_what_is_only_odd_is_a_warning(recipe, overrides, start):
    resolved = resolve(recipe(), overrides)
    assert check(resolved) == []
    (line,) = [str(problem) for problem in warnings(resolved)]
    assert line.startswith(start)


def test_nothing_is_odd_about_the_smallest_recipe(recipe):
    assert warnings(resolve(recipe())) == []


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
    assert len(lines) == (0 if apart else 1) and all("some of its questions are trained on" in line for line in lines)
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


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["train.warmup_ratio=1.5"], "train.warmup_ratio=1.5 (command line): must be a share in [0, 1]"),
        (
            ["train.warmup_ratio=0.1", "train.warmup_steps=5"],
            "train.warmup_ratio=0.1 (command line): must be 0 if warmup_steps is set (here 5",
        ),
        (
            ["train.final_lr_ratio=0.1"],
            "train.final_lr_ratio=0.1 (command line): must be 0 with schedule=constant, which does not fall",
        ),
    ],
)
def test_a_schedule_without_an_effect_is_refused(recipe, overrides, start):
    with pytest.raises(ConfigError) as caught:
        resolve(recipe(), overrides)
    assert str(caught.value).startswith(start)


def test_a_share_of_warm_up_that_is_the_whole_run_is_a_warning(recipe):
    (line,) = [str(problem) for problem in warnings(resolve(recipe(), ["train.warmup_ratio=1"]))]
    assert "lower train.warmup_ratio" in line


def test_bfloat16_weights_that_would_not_change_are_a_warning(recipe):
    words = ["model.dtype=bfloat16", "model.compute_dtype=bfloat16"]
    (line,) = [str(problem) for problem in warnings(resolve(recipe(), [*words, "train.optimizer.lr=1e-6"]))]
    assert line.startswith("train.optimizer.lr=1e-06 (command line): an update moves a weight of 0.02 by about 5e-05")
    assert "2^-8 = 0.0039: weights above 0.0003 do not change; set model.dtype=float32" in line
    assert warnings(resolve(recipe(), [*words, "train.optimizer.lr=1e-4"])) == []
    assert warnings(resolve(recipe(), ["train.optimizer.lr=1e-6"])) == []


def test_only_what_is_trained_in_bfloat16_is_warned_about(recipe):
    """An adapter is float32, and a critic of its own is not."""
    words = ["model.dtype=bfloat16", "model.compute_dtype=bfloat16", "train.optimizer.lr=1e-6"]
    lora, critic = "model.lora={rank: 4}", ["algorithm=ppo", "critic=model"]
    own = ["critic.optimizer={kind: adamw, lr: 1e-6}", "train.optimizer.lr=1e-4"]

    def about(*overrides):
        problems = [str(problem) for problem in warnings(resolve(recipe(), list(overrides)))]
        return [line.partition("=")[0] for line in problems if "2^-8" in line]

    assert about(*words, lora) == []
    assert about(*words, lora, *critic) == ["train.optimizer.lr"]
    assert about(*words, *critic) == ["train.optimizer.lr"]
    assert about(*words[:2], lora, *critic, *own) == ["critic.optimizer.lr"]


def test_rounding_takes_the_updates_of_weights_above_the_bound():
    """The claim of the warning: at lr 1e-6, Adam leaves a bfloat16 weight of 0.02 as it is, and moves one of 0.0001."""
    for value, moves in ((0.02, False), (1e-4, True)):
        weight = torch.nn.Parameter(torch.full((2, 2), value, dtype=torch.bfloat16))
        before, optimizer = weight.detach().clone(), AdamW(lr=1e-6).build([weight])
        for _ in range(5):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert bool((weight != before).all()) == moves == bool((weight != before).any())


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
    assert line.endswith("its figures are those of training data; name another file with eval.task.path")


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


def test_a_metric_of_a_further_set_is_known_by_the_name_of_the_set(recipe):
    sets = "eval.sets=[{name: hard, task: {kind: arithmetic}, samples: 4}]"
    names = [f"eval.task={ELSEWHERE}:Sums", sets]
    for metric in ("hard/accuracy", "hard/pass@4", "hard/number", "accuracy"):
        assert problems(recipe, *names, f"eval.metric={metric}") == []
    (line,) = problems(recipe, *names, "eval.metric=hard/acuracy")
    assert "an evaluation has no such metric; did you mean 'accuracy'?" in line
    (line,) = problems(recipe, *names, "eval.metric=pass@4")
    assert "an evaluation has no such metric" in line
    (line,) = problems(recipe, *names, "eval.metric=hard/length", "checkpoint.keep_best=true", "eval.every=1")
    assert "keep_best keeps the highest" in line


def test_gdpo_has_the_weights_of_the_rewards(recipe):
    rewards = "reward=[{kind: number}, {kind: length, tokens: 8, weight: 0}]"
    words = ["algorithm.advantage.kind=gdpo", rewards]
    (line,) = problems(recipe, *words)
    assert "algorithm.advantage.weights=null (default): weighs every reward by 1" in line and "set it to [1, 0]" in line
    assert problems(recipe, *words, "algorithm.advantage.weights=[1, 0]") == []


ALL = [check.check() if isinstance(check, IfSet) else check for check in (*CHECKS, *WARNINGS)]


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
