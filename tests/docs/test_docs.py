"""Made pages are what the code says, links lead somewhere, and what is said of the peers is what the golden records
show."""

import re
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from proxima.config.presets import ALGORITHMS
from proxima.config.resolution import resolve
from proxima.rollout.prompt_limits import DynamicSampling
from scripts import first_screen, method_pages
from tests.docs.printed import STARTS, section

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *ROOT.glob("packages/*/docs/*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md")),
    ]
)


@pytest.fixture(scope="module")
def made():
    """The pages that `make docs` writes."""
    return method_pages.pages()


def test_every_made_page_is_what_the_code_says(made):
    """A page of a method that is gone is removed by hand."""
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, "run make docs"
    assert set((DOCS / "algorithms").glob("*.md")) == {path for path in made if path.parent.name == "algorithms"}


@pytest.mark.slow
def test_every_figure_is_what_the_surrogate_says():
    """To a tenth of a pixel: another CPU may round a coordinate the other way."""
    made = method_pages.figures()
    assert set((DOCS / "algorithms").glob("*.svg")) == set(made)
    number = re.compile(r"-?\d+\.\d+|-?\d+")
    for path, text in made.items():
        current = path.read_text(encoding="utf-8")
        assert number.sub("0", current) == number.sub("0", text), f"{path.name}: run make docs"
        pairs = zip(number.findall(current), number.findall(text), strict=True)
        assert all(abs(float(a) - float(b)) <= 0.11 for a, b in pairs), f"{path.name}: run make docs"


def test_the_first_picture_shows_the_run_of_the_learning_curve():
    curve = (DOCS / "learning_curve.svg").read_text(encoding="utf-8")
    assert (DOCS / "first_screen.svg").read_text(encoding="utf-8") == first_screen.picture(curve), "run make docs"
    with pytest.raises(ValueError, match="has no title with its figures"):
        first_screen.picture("<svg><title>a run</title></svg>")


def test_the_code_of_the_page_on_core_runs(capsys):
    """From top to bottom, in one namespace; its assertions are the page's claims."""
    blocks = re.findall(
        r"```python\n(.*?)```", section("docs/reading.md", "The mathematics in a loop of your own"), re.DOTALL
    )
    assert len(blocks) >= 5
    exec(compile("\n".join(blocks), "docs/reading.md", "exec"), {})
    assert "ratio " in capsys.readouterr().out


def test_the_algorithm_that_a_page_writes_out_is_the_preset():
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(algorithm:\n.*?)```", text, re.DOTALL)[1]
    assert yaml.safe_load(block)["algorithm"] == ALGORITHMS["cppo"]


def test_a_kind_without_a_note_is_named(monkeypatch):
    table = {**method_pages.kinds("surrogate"), "mine": object}
    real = method_pages.kinds
    monkeypatch.setattr(method_pages, "kinds", lambda slot: table if slot == "surrogate" else real(slot))
    with pytest.raises(
        ValueError, match="notes.yaml: surrogate: mine: a kind without a note, there or in its docstring"
    ):
        method_pages.read_notes()


def test_the_recipe_of_an_agent_resolves(tmp_path, monkeypatch):
    text = section("docs/environments.md", "A program")
    (tmp_path / "my_agent.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    config = resolve("my_agent.yaml").config  # as `load_recipe` reads it, which would download the model
    assert config.task.environment == config.eval.task.environment
    assert all((ROOT / word).is_file() for word in config.task.environment["command"][1:])


@pytest.mark.slow
def test_what_a_page_shows_of_a_recipe_resolves(made):
    """The keys are those of the schema, and the numbers beside them are what they make."""
    by_name = {}
    for kind in ("drop_uniform_groups", "prune"):
        text = made[DOCS / "algorithms" / f"{kind}.md"]
        recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
        recipe["algorithm"]["surrogate"] = "ppo_clip"
        by_name[kind] = resolve({"model": {"path": "a/b"}, "task": "arithmetic", "reward": ["number"], **recipe}).config
        assert all(f"**{part}.**" in text for part in ("Metrics", "Published"))
    refill = by_name["drop_uniform_groups"].algorithm.dynamic_sampling
    assert refill == DynamicSampling()  # what the page shows is the default
    assert by_name["drop_uniform_groups"].algorithm.selection[0].metric == "accuracy"
    pruned, train = by_name["prune"].algorithm.selection[1], by_name["prune"].train
    factor = pruned.prompts_factor(train.completions_per_prompt)
    assert (pruned.kept(16), factor, train.prompts_per_step * factor) == (2, 8, 64)


def test_a_method_is_one_screen(made):
    for path, text in made.items():
        if path.parent.name == "algorithms" and path.name != "README.md":
            assert len(text.splitlines()) <= 60, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, place in re.findall(r"(?<!\\)\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not place or place in anchors(file), f"{target}#{place}"


def anchors(page):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_level_of_headings_is_left_out(page):
    """The site is built with warnings as errors."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    for above, below in pairwise(levels):
        assert below <= above + 1, (above, below)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_code_block_can_be_read(page):
    """bash parses the bash blocks, YAML loads, and no command of an indented block is wrapped into two lines."""
    text = page.read_text(encoding="utf-8")
    for _, language, body in re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        if language == "bash":
            subprocess.run(["bash", "-n"], input=body, text=True, check=True)
        elif language == "yaml":
            list(yaml.safe_load_all(textwrap.dedent(body)))
    for block in re.findall(r"\n\n((?:    .*\n)+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        lines = [line.strip() for line in block.splitlines()]
        if any(line.startswith("proxima ") for line in lines):
            whole = [line for before, line in zip(["", *lines], lines, strict=False) if not before.endswith("\\")]
            others = {line for line in whole if not STARTS.fullmatch(line) and line[0] != "#"}
            assert {line for line in others if line.split()[0] not in ("torchrun", ".venv-vllm/bin/python")} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "algorithms"], ids=lambda p: p.name)
def test_code_and_commands_fit_a_hundred_columns(page):
    """What is fenced, and every command; formulas and quoted output may be longer."""
    fenced, wide = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif (fenced or (line.startswith("    ") and STARTS.fullmatch(line.strip()))) and len(line) > 100:
            wide.append(number)
    assert not wide and not fenced


def test_the_index_lists_every_page():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([^)#]+\.md)", index))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= listed


def test_the_tables_lead_to_every_method():
    kinds = [kind for slot in method_pages.SLOTS for kind in method_pages.kinds(slot)]
    assert len(kinds) == len(set(kinds)) >= 48  # one folder holds the pages of all slots
    for page, folder in ((DOCS / "algorithms" / "README.md", ""), (method_pages.PEERS, "../../../docs/algorithms/")):
        text = page.read_text(encoding="utf-8")
        assert all(f"| [`{kind}`]({folder}{kind}.md) | " in text for kind in kinds), page.name


def test_the_glossary_has_every_name_of_a_metric_beside_ours():
    from proxima.experiments.metric_names import METRIC_ALIASES

    _, _, text = (DOCS / "glossary.md").read_text(encoding="utf-8").partition("## Metric names")
    table, _, _ = text.partition("No run records")
    rows = re.findall(r"^\| `([^`<]+)` \| (.*?) \|", table, re.MULTILINE)
    assert {name: ours for ours, names in rows for name in re.findall("`(.*?)`", names)} == METRIC_ALIASES


def test_the_files_and_the_picture_name_what_is_there():
    page, picture = ((DOCS / name).read_text(encoding="utf-8") for name in ("reading.md", "way_of_the_data.svg"))
    the_loop, after_a_kill = (
        re.findall(r"^\| \d+ \| \[`([\w/.]+)`\]", part, flags=re.M)
        for part in page.split("## How a run survives a kill")
    )
    listed, drawn = [*the_loop, *after_a_kill], re.findall(r">([\w/]+(?:/|\.py))<", picture)
    assert len(the_loop) == 11 and len(after_a_kill) <= 12 and len(drawn) == 8
    package = {f"runtime/resume/{file.name}" for file in (ROOT / "src/proxima/runtime/resume").glob("[!_]*.py")}
    assert package <= set(after_a_kill)
    assert not [name for name in (*listed, *drawn) if not (ROOT / "src/proxima" / name).exists()]
