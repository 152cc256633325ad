"""The README is short, shows the loop as it is, and explains its terms."""

import inspect
import re
import textwrap
from pathlib import Path

from proxima.runtime.loop.controller import Controller
from tests.docs.printed import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
# what every reader of this field knows; `value` and `return` are other words there
ORDINARY = {"value", "return", "reward model", "group", "completion", "task", "engine", "μ", "π", "r", "v"}
EXPLAINED = {
    "publish": "*publish* gives the engine the new weights",
    "journal": "A prompt's state is written to a journal before it is acted on",
    "recipe": "the recipe, the YAML file of a run",
    "advantage": "how completions of a prompt are compared (the advantage)",
    "surrogate": "how far a token may move the policy (the surrogate)",
    "selection": "which completions count (the selection)",
    "aggregate": "how tokens are averaged (the aggregation)",
}


def glossary() -> set[str]:
    """The terms of the glossary that are words, not names of fields."""
    ours = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").partition("## Metric names")[0]
    cells = [line[2:].split(" | ")[0] for line in ours.splitlines() if line.startswith("| ")]
    words = ", ".join(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell) for cell in cells if "`" not in cell)
    return {word.removesuffix(" policy").lower() for word in words.split(", ")} - {"here"}


def first_use(term: str) -> str | None:
    """The paragraph in which the prose first uses a term."""
    paragraphs = re.split(r"\n\n|\n(?=- )", re.sub(r"!\[.*?\]\(.*?\)", "", PROSE))
    return next((each for each in paragraphs if re.search(rf"\b{re.escape(term)}s?\b", each, re.IGNORECASE)), None)


def test_a_term_of_the_glossary_is_explained_or_linked_where_it_is_first_used():
    terms = glossary() - ORDINARY
    assert len(terms) > 40
    for term in terms:
        if (used := first_use(term)) is not None:
            linked = any(term in words.lower() for words in re.findall(r"\[([^\]]*)\]\(", used))
            assert linked or EXPLAINED.get(term, "?") in " ".join(used.split()), term


def test_the_loop_that_it_shows_is_the_loop():
    shown = re.search(r"```python\n(async def train.*?)```", TEXT, re.DOTALL)
    assert shown is not None and shown[1] == textwrap.dedent(inspect.getsource(Controller.train))


def test_it_is_short():
    commands = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
    assert len(TEXT.split()) <= 1040 and len(re.findall(r"\]\(", TEXT)) <= 28
    assert sum(line.startswith(("make ", "proxima ")) for line in commands) <= 12


def test_each_proof_names_its_page():
    rows = TEXT.partition("| | proven | not proven |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 7
    for page in re.findall(r"\]\(([^)#]+)", "\n".join(rows)):
        assert Path(ROOT / page).is_file()
