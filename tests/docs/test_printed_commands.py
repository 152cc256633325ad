"""Every command that README, the docs and the examples print runs as printed, page by page in a new checkout.

The checkout is real but small: a model of a few thousand weights where the recipes expect theirs, recipes of two steps,
data sets of a few rows. Mentions inside a sentence, headers of recipes and `--help` are parsed, and a recipe with its
overrides is resolved; so is what `NOT_RUN` lists, with the reason.
"""

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from transformers.utils import logging

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.experiments.sweep_file import read_sweep
from proxima.prepare.catalog import SOURCES
from proxima.system import user_files
from proxima_plan.rehearsal import rehearsal
from tests.cli.conftest import few_cases, quick_machine  # noqa: F401
from tests.cli.warm_rehearsals import WarmExecutor
from tests.docs.printed import ROOT, fence, pages
from tests.prepare.published import write_jsonl
from tests.tiny import tiny, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("lent_servers", "warm_processes")
PAGES = pages()
FIRST = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/commands.md",
    "docs/start.md",
)  # what `make test` runs; of all others it reads them
NOT_RUN = (  # pattern of a command, why it is only parsed and resolved
    (r"proxima engine ", "needs another program or a server that runs"),
    (r"proxima train .*(vllm|sglang)", "needs a server; tests/engine has fakes of their protocols"),
    (r"proxima (train .*(localhost|scorer)|reward serve)", "serves until Ctrl-C; tests/reward runs both sides"),
    (r"proxima (check|reward score) .*localhost", "needs a judge that answers; tests/reward has one"),
    (r"proxima train .*running_application", "waits for an application; tests/rollout/episodes has some"),
    (r"proxima train .*monitor=\[wandb\]", "needs an account"),
    (r"proxima .*model.device=cuda", "needs a GPU"),
    (r"proxima generate .*--chat", "waits for a person"),
    (r"proxima (view|train .*view=true)", "serves until Ctrl-C; tests/view/microscope runs it"),
    (r"proxima serve-training", "serves until Ctrl-C; proxima-tinker's tests run it"),
    (
        r"proxima data prepare|proxima data .* data/dapo|proxima data check",
        "downloads; tests/prepare makes every set from files",
    ),
    (
        r"proxima (sweep|compare) .*(results|dapo_parts|pruning|zero_gradient|trust_regions --baseline grpo )",
        "takes hours",
    ),
    (r"proxima plan .*(--devices \d+-|--from)", "takes minutes, or needs a run; proxima-plan's tests have small ones"),
    (r"proxima submit", "needs a Ray cluster; tests/cli/test_submit.py has one"),
    (r"proxima train .*kind: ray", "starts a Ray cluster; tests/runtime/placement has those"),
    (r"proxima (train|eval) .*(runs/two|/shared/)", "needs the ranks' run"),
    (
        r"proxima (train .*@layouts/|plan .*--exact)",
        "needs a cluster, or minutes; tests/recipes/test_layouts.py has small ones",
    ),
    (
        r"proxima train (cpu/\w+|quickstart|examples/(own_reward|unit_tests)/recipe.yaml)$",
        "tests/recipes and tests/examples run two steps of each",
    ),
    (r"proxima train .*local_process", "starts a process of its own, as cpu/async of tests/recipes does"),
)
CAPITALS = {  # what a reader fills in
    "MODEL": "models/smollm2-135m-instruct",
    "RUN": "runs/mine",
    "RECIPE": "quickstart",
    "NEWPLACE": "runs/mine",
    "ADAPTER": "adapter",
    "URL": "http://127.0.0.1:8000",
    "SLOT": "surrogate",
    "NAME": "gsm8k",
    "FILE": "packages/proxima-peers/tests/golden/made_here.json",
    "FOLDER": "data/gsm8k",
    "OUT": "exported/out",
}
FENCES = {  # page → what its reader has saved under a name, and words of that block
    "CONTRIBUTING.md": {
        "my_lab/losses.py": "class SoftClip",
        "my_lab/rewards.py": "class Short",
        "my_lab/engines.py": "class Scripted",
    },
    "docs/evidence.md": {"trust_regions.yaml": "grid:"},
    "docs/rewards.md": {"my_reward.py": "def near"},
}
FILES = {  # page → what else its reader has: a run of the quickstart, or a copy of one of our files
    "docs/environments.md": {"runs/mine": "run"},
    "docs/evaluation.md": {"runs/mine": "run", "runs/a": "run", "runs/b": "run"},
    "docs/evidence.md": {"runs/first": "run", "runs/second": "run", "runs/add-1": "run"},
    "packages/proxima-peers/docs/migration.md": {"run.yaml": "packages/proxima-peers/tests/examples/verl_dapo.yaml"},
    "packages/proxima-peers/docs/shadow.md": {
        "step.npz": "packages/proxima-peers/tests/shadow/dumps/verl_low_var_kl.npz"
    },
    "docs/rewards.md": {"runs/mine": "run"},
    "docs/run_folder.md": {"runs/mine": "run", "config.yaml": "run/config.yaml"},
    "examples/rollout_pairs.py": {"runs/quickstart": "run", "runs/one": "run", "runs/other": "run"},
}


def untrained():
    """The last run made its steps, but so small a model had the same reward in each answer."""
    last = max(Path().rglob("summary.json"), key=lambda file: file.stat().st_mtime_ns, default=None)
    summary = {} if last is None else json.loads(last.read_text())
    return summary.get("status") == "untrained"


def later(page):
    here = "tests/docs/test_printed_commands.py"
    return pytest.mark.campaign(f"{here}::test_every_command_of_a_page_is_one[{page}]")


TINY = {  # field of a recipe → its value where the recipe sets it; every answer is 0, which the model often says
    "second_low": 0, "second_high": 0,
    "size": 6, "count": 6, "limit": 2, "prompts_per_step": 2, "completions_per_prompt": 4, "updates_per_step": 1,
    "steps": 2, "examples_per_step": 2, "warmup_steps": 0, "every": 1, "seeds": [1], "max_concurrent_rollouts": 4,
    "seconds": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A small checkout, which each page copies."""
    top = tmp_path_factory.mktemp("printed") / "proxima"
    for name in ("recipes", "examples", "benchmarks/results"):
        shutil.copytree(ROOT / name, top / name)
    for name in ("tests", "scripts", "docs", "src", "packages", "constraints.txt", "pyproject.toml"):
        (top / name).symlink_to(ROOT / name)
    for file in (*top.rglob("recipes/**/*.yaml"), *top.rglob("examples/**/*.yaml")):
        shrink(file)
    model(top / "models/smollm2-135m-instruct")
    data(top / "data")
    return top


def model(folder):
    """A qwen2 of a few thousand weights with room for a long prompt, which says 0s and 1s and stops after a few."""
    logging.disable_progress_bar()
    made, tokenizer = tiny("qwen2"), tiny_tokenizer()
    made.config.max_position_embeddings = 2048
    with torch.no_grad():
        made.get_input_embeddings().weight[:, 0] = 8.0  # the same for each token, so it is there in every state
        made.lm_head.weight[:, 0] = -1.0
        made.lm_head.weight[[0, *tokenizer("01").input_ids]] = torch.eye(1, 32)
        made.model.norm.weight[0] = 1.5
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def data(folder):
    """GSM8K, its published solutions, and two sets of one problem each."""
    rows = [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 13)]
    for name in ("gsm8k", "math500", "aime24"):
        for side, part in (("train", rows[:9]), ("test", rows[9:])):
            short = part if name == "gsm8k" else [part[0] | {"answer": part[0]["answer"].split()[-1]}]
            write_jsonl(folder / name / f"{side}.jsonl", short)
    solved = [
        {
            "question": f"{i} + {i} = ?",
            "ground_truth": f"A: {2 * i}",
            "a": {"is_correct": True, "solution": f"{2 * i}"},
            "b": {"is_correct": False, "solution": f"{2 * i + 1}"},
        }
        for i in range(40)
    ]
    for place in (".", "runs/classic/pairs"):
        write_jsonl(folder.parent / place / "example_model_solutions.jsonl", solved)


def shrink(file):
    """The recipe with the values of `TINY`; GSM8K from files; pruning keeps its 16 completions."""
    recipe = yaml.safe_load(file.read_text())
    kept = {"completions_per_prompt"} if "prune" in file.name else set()

    def smaller(node, name=""):
        if isinstance(node, list):
            return [smaller(item) for item in node]
        if not isinstance(node, dict):
            return node
        last = {key: key.rpartition(".")[2] for key in node}
        small = TINY.keys() - kept
        node = {key: TINY[last[key]] if last[key] in small else smaller(value, key) for key, value in node.items()}
        if node.get("kind") == "arithmetic":
            node["operators"] = ["*"]
        if name == "grid":
            node = {axis: values[::2] for axis, values in node.items()}
        if name == "task" and node.get("kind") == "gsm8k":
            node = {"path": "data/gsm8k", **node}
        return node

    file.write_text(yaml.safe_dump(smaller(recipe), sort_keys=False))


@pytest.fixture(scope="module")
def given(checkout, tmp_path_factory):
    """`run`: a run of the quickstart with a second reward, called style."""
    folder = tmp_path_factory.mktemp("given")
    rewards = "reward=[number, {kind: length, name: style, weight: 0}]"
    with chdir(checkout):
        assert main(["train", "recipes/quickstart.yaml", rewards, f"folder={folder}/run", "--quiet"]) == 0
    return folder


@pytest.fixture
def here(checkout, tmp_path, monkeypatch, few_cases, quick_machine):  # noqa: F811
    """A copy of the checkout as the current folder; proxima finds its recipes there."""
    top = tmp_path / "proxima"
    shutil.copytree(checkout, top, symlinks=True)
    monkeypatch.chdir(top)
    monkeypatch.setattr(user_files, "shipped_folder", lambda: top / "recipes")
    for name in ("SCORER_TOKEN", "TOKEN"):  # that of the help of `reward` among them
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(rehearsal, "ProcessPoolExecutor", WarmExecutor)
    modules = set(sys.modules)
    yield top
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


class Shell:
    """Runs commands as a shell in the checkout would, in this process."""

    def __init__(self, top, monkeypatch):
        self.top, self.patch = top, monkeypatch

    def run(self, command, look):
        for words in command.steps:
            words = [re.sub(r"^train\.steps=\d+$", "train.steps=2", CAPITALS.get(word, word)) for word in words]
            while re.fullmatch(r"[A-Z0-9_]+=.*", words[0]):
                words.pop(0)
            program, rest = words[0], words[1:]
            if program == "proxima":
                reason = next((why for pattern, why in NOT_RUN if re.match(pattern, " ".join(words))), None)
                self.look(rest) if look or reason else self.proxima(rest)
            elif program == "cat":
                Path(rest[1]).write_text(command.body) if not look else None
            elif program == "cd" and look:
                continue
            elif program == "cd":
                self.patch.chdir(rest[0] if Path(rest[0]).is_dir() else self.top)  # a clone, a temporary folder
            elif program == "make":
                self.make(rest)
            elif program == "python":
                self.python(rest, look)
            elif program == "pip":
                self.pip(rest)
            elif program == "tar":
                assert look or Path(rest[-1]).is_dir(), rest
            elif program == "export":
                name, _, value = rest[0].partition("=")
                self.patch.setenv(name, value.replace("…", "secret"))
            else:  # git clone, source: the shell's own
                assert program in ("git", "source"), words

    def proxima(self, words):
        code = main(words)
        assert code == 0 or (words[0] == "train" and untrained()), f"exit code {code}"
        for folder in self.top.glob("*/*-2???????-*"):  # two within a second would have the same name
            shutil.rmtree(folder)
        if words[0] == "init":
            recipe = Path(words[1] if len(words) > 1 else ".") / "recipe.yaml"
            shrink(recipe)
            (recipe.parent / "models").symlink_to(self.top / "models")  # which it would download

    def look(self, words):
        """The command's arguments, and the recipe that a training reads."""
        if "--help" in words:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("proxima.cli.commands.bound", lambda command, arguments: lambda: 0)
            code = main([word for word in words if "…" not in word])
        assert code == 0, f"exit code {code}"
        if words[0] in ("train", "explain", "plan", "submit"):
            if words[1] in user_files.shipped_recipes():
                given = [word for word in words[2:] if ("=" in word or word[0] == "@") and "…" not in word]
                resolve(words[1], given, root=None)
            else:
                assert words[1].startswith("runs/") or words[1].endswith(".yaml"), words[1]  # the reader's own
        if words[0] == "sweep":
            read_sweep(words[1])
        assert words[:2] != ["data", "prepare"] or words[2] in SOURCES

    def make(self, words):
        targets = [word for word in words if "=" not in word]
        assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), targets

    def pip(self, words):
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), extra

    def python(self, words, look):
        """A script runs; of a benchmark, which takes minutes, the arguments are parsed."""
        if words[0] == "-P":
            words = words[1:]
        if words[0] == "-m":
            if words[1].startswith("benchmarks"):
                assert importlib.util.find_spec(words[1]) is not None, words[1]
            return
        assert (self.top / words[0]).is_file(), words[0]
        if not look and words[0].endswith(
            ("_pairs.py", "_corpus.py", "_episodes.py")
        ):  # tests/examples runs the others
            self.patch.setattr(sys, "argv", words)
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                assert not end.code, end.code


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in FIRST])
def test_every_command_of_a_page_is_one(page, checkout, monkeypatch, capsys, request):
    """Its program, options and extras exist; a recipe with its overrides resolves, a sweep can be read, and data have a
    source."""
    top = request.getfixturevalue("here") if page in FENCES else checkout
    for name in ("SCORER_TOKEN", "TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.chdir(top)
    save_fences(page, top)
    shell = Shell(top, monkeypatch)
    for command in PAGES[page]:
        with reported(page, command, capsys):
            shell.run(command, look=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page if page in FIRST else pytest.param(page, marks=later(page)) for page in PAGES])
def test_every_command_of_a_page_runs(page, here, given, monkeypatch, capsys):
    shell = Shell(here, monkeypatch)
    save_fences(page, here)
    for name, source in FILES.get(page, {}).items():
        place = (given if source.startswith("run") else ROOT) / source
        shutil.copytree(place, here / name) if place.is_dir() else shutil.copyfile(place, here / name)
    header = not page.endswith(".md") and not page.startswith("examples")
    for command in PAGES[page]:
        monkeypatch.chdir(here) if command.mention else None
        with reported(page, command, capsys):
            shell.run(command, look=header or command.mention)


def save_fences(page, top):
    for name, words in FENCES.get(page, {}).items():
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text(fence(page, words))
        shrink(top / name) if name.endswith(".yaml") else None


@contextmanager
def reported(page, command, capsys):
    """A failure names the line of the page and shows what the command printed."""
    try:
        yield
    except BaseException as error:
        out, err = (text[-800:] for text in capsys.readouterr())
        pytest.fail(f"{page}:{command.line}: {command.text}\n{type(error).__name__}: {error}\n{out}\n{err}")
    capsys.readouterr()


def test_every_recipe_prints_a_command():
    recipes = {str(file.relative_to(ROOT)) for file in (ROOT / "recipes").rglob("*.yaml")}
    assert recipes - PAGES.keys() == {"recipes/gsm8k.yaml", "recipes/gsm8k_cppo.yaml"}


def test_what_is_not_run_is_printed_somewhere():
    texts = [shlex.join(words) for commands in PAGES.values() for command in commands for words in command.steps]
    for pattern, reason in NOT_RUN:
        assert reason and any(re.match(pattern, text.replace("'", "")) for text in texts), pattern
