"""What pages say of packages, extras and numbers of things is what there is."""

import re
import tomllib
from pathlib import Path

from proxima.cli.commands import COMMANDS
from proxima.core import CORRECTION_PRESETS
from proxima.environment import ENVIRONMENTS
from proxima.training import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NUMBERS = dict(zip(["three", "four", "five", "six", "seven", "eight", "nine", "ten"], range(3, 11), strict=True)) | {
    "twenty": 20
}
NAMES = {"textarena": "textarena", "reasoning-gym": "reasoning_gym", "SkyRL-Gym": "skyrl_gym", "MCP": "mcp"}
NAMES |= {"OpenEnv": "openenv", "verifiers": "verifiers", "NeMo Gym": "nemo_gym"}


def page(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def written():
    """Every file in which an extra may be named."""
    folders = ("docs", "src", "packages", "examples", "recipes", "benchmarks", "evidence")
    ends = {".md", ".py", ".yaml", ".ipynb"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ends]
    return [ROOT / "README.md", *files]


def test_the_page_of_installation_has_each_extra():
    table = (ROOT / "docs/start.md").read_text(encoding="utf-8").partition("| extra | adds |")[2].partition("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines() if " | " in row]
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(rows))) == sorted(EXTRAS)
    (of_all,) = re.findall(r"all of these but (.*?);", table)
    absent = set(re.findall(r"`([a-z-]+)`", of_all))
    named = {name for need in EXTRAS["dev"] for name in re.findall(r"proxima-rl\[(.*)\]", need)}
    assert set(",".join(named).split(",")) == set(EXTRAS) - absent - {"dev", "demo"}


def test_an_extra_that_is_named_exists():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in written()
        for extras in re.findall(r"proxima-rl\[([a-z,-]+)\]", path.read_text(encoding="utf-8"))
        for name in extras.split(",")
        if name not in EXTRAS
    ]
    assert wrong == []


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    """A wheel or a checkout comes first: the name alone would be somebody else's package."""
    for path in [ROOT / "examples/first_run.ipynb", ROOT / "examples/core_in_trl.py"]:
        assert not re.search(r"pip install[^`\n]*proxima-rl", path.read_text(encoding="utf-8")), path.name


def test_the_adapters_of_environments():
    references = ENVIRONMENTS.references.items()
    adapters = {kind for kind, place in references if place.startswith("proxima_worlds.")}
    adapters -= {"harbor"}  # which plays a format
    (said,) = re.findall(r"adapters for (textarena.*?)[.;]", page("CHANGELOG.md"))
    assert {NAMES[word] for word in re.split(r", | and ", said)} == adapters
    own = set(ENVIRONMENTS) - adapters - {"agent", "harbor", "sessions"}
    (count,) = re.findall(r"(\w+) come with proxima", page("CHANGELOG.md"))
    assert NUMBERS[count.lower()] == len(own)


def test_counts_of_the_changelog():
    text = page("CHANGELOG.md")
    assert f"{len(CORRECTION_PRESETS)} of verl's by name" in text
    (count,) = re.findall(r"(\w+) commands, listed by what one wants", text)
    assert NUMBERS[count.lower()] == len(COMMANDS)


def test_what_the_packages_need_is_said_where_they_are_installed():
    needs = tomllib.loads((ROOT / "packages/proxima-tinker/pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"proxima-rl\[(.*?)\]", needs["dependencies"][0])[0].split(",")
    said = page("docs/start.md")
    for name in ("tinker", "protobuf", *extras):
        assert f"`{name}`" in said.partition("`proxima-tinker` also installs")[2].partition("## ")[0]
    for name in ("docs/index.md", "packages/proxima-tinker/docs/served_training.md"):
        assert "proxima-tinker" in page(name)


def test_the_tasks_of_the_example():
    (count,) = re.findall(r"has (\w+) tasks to try it on", page("docs/rewards.md"))
    rows = (ROOT / "examples/unit_tests/tasks.jsonl").read_text(encoding="utf-8").splitlines()
    assert NUMBERS[count] == len(rows)


def test_the_optimizers():
    (count,) = re.findall(r"\*\*(\w+) optimizers\*\*", page("docs/limits.md"))
    assert NUMBERS[count.lower()] == len(OPTIMIZERS)


def test_no_page_counts_what_grows():
    """Families of models, goals of a page and files of a list: a number there would be wrong with the next one."""
    counted = r"(?i)\b(\w+teen|eleven|twelve|\w+ty) (families|files of the loop|goals|kinds)\b"
    found = [
        path.name
        for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        if re.search(counted, path.read_text())
    ]
    assert found == []
