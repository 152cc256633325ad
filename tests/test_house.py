"""Rules of the house that no other tool checks."""

import ast
import gc
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import proxima
import proxima_peers
import proxima_plan
import proxima_tinker
import proxima_worlds
from scripts import house, make_docs, portable

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
PACKAGES = house.PACKAGES
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
ROOMS = sorted(path for package in PACKAGES for path in package.glob("*/__init__.py"))


def name_of(path: Path) -> str:
    package = next(package for package in PACKAGES if path.is_relative_to(package))
    return str(path.relative_to(package.parent)).removeprefix("proxima/")


@cache
def modules():
    return {module.path: module for module in house.read_modules()}


def imported(path: Path) -> set[str]:
    """Top-level names of all imports, those inside functions too."""
    nodes = modules()[path].nodes
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module", autouse=True)
def no_collector():
    """None of a million nodes of syntax trees is garbage, and looking through them takes as long as the tests."""
    gc.disable()
    yield
    gc.enable()


def test_the_package_breaks_no_rule():
    """Sizes, names with one meaning, circles, imports at the top, code that nothing reaches."""
    assert {rule: problems for rule, problems in house.violations().items() if problems} == {}


def module_of(text: str) -> house.Module:
    path = ROOT / "src" / "proxima" / "task" / "made_up.py"
    return house.Module("proxima.task.made_up", path, text, ast.parse(text))


def test_an_import_inside_a_function_needs_a_seam(monkeypatch):
    monkeypatch.setattr(house, "ALLOWED_LATE_IMPORTS", {})
    late = module_of(
        "import os\nfrom proxima import data\n\n\ndef f():\n    import torch\n    from proxima.core import loss\n"
    )
    line = "task/made_up.py:7: imports proxima.core inside a function; import it at the top"
    assert list(house.late_imports([late])) == [("task", line)]
    monkeypatch.setattr(house, "ALLOWED_LATE_IMPORTS", {"proxima.task.made_up: proxima.core": "a reason"})
    assert list(house.late_imports([late])) == []
    ((room, unused),) = house.late_imports([module_of("import os\n")])
    assert room == "task" and "proxima.task.made_up: proxima.core" in unused
    monkeypatch.setattr(house, "LATE_IMPORTS", 0)
    assert ("proxima", "1 imports of our own inside functions, at most 0") in house.late_imports([late])


def test_text_is_opened_with_its_encoding():
    """The encoding of the locale is ASCII in a container without one."""
    wrong = """path.read_text()
        path.write_text(text, errors="replace")
        open(name)
        open(name, "a")
        path.open()
        path.open("w")
        os.fdopen(1, "w")
        gzip.open(name, "rt")
        NamedTemporaryFile("w")
        io.TextIOWrapper(raw)
        subprocess.run(words, text=True)
        subprocess.Popen(words, universal_newlines=True)"""
    right = """path.read_text(encoding="utf-8")
        path.read_text("utf-8")
        path.write_text(text, "utf-8")
        open(name, "rb")
        path.open("ab")
        os.open(name, flags)
        os.fdopen(1, "wb")
        gzip.open(name)
        TemporaryFile()
        Image.open(name)
        table.open(rows, limit)
        decoded(text=text)
        subprocess.run(words, encoding="utf-8", errors="replace")"""
    for text, expected in ((wrong, 12), (right, 0)):
        lines = "\n".join(map(str.strip, text.splitlines()))
        found = list(portable.unspecified_encodings("made_up.py", list(ast.walk(ast.parse(lines)))))
        assert len(found) == expected, found


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        (
            portable.linux_calls,
            "import fcntl\nfrom os import memfd_create\nos.sched_getaffinity(0)\nopen('/proc/stat')\nx.bind('\\0x')",
            "import select\nselect.poll()\nopen('/dev/null')\nprocess = 'a /proc'\nos.cpu_count()",
        ),
        (
            portable.http_clients,
            "httpx.AsyncClient(trust_env=False)\nhttpx.get(url)\nurllib.request.urlopen(url)\nrequests.post(url)",
            "httpx.Limits()\nhttp_client(url)\nself.client.get(url)\nurllib.parse.quote(url)",
        ),
    ],
    ids=["platform", "clients"],
)
def test_what_differs_between_computers_has_one_place(rule, wrong, right):
    found = list(rule("made_up.py", list(ast.walk(ast.parse(wrong)))))
    assert sorted(int(text.split(":")[1]) for text in found) == list(range(1, len(wrong.splitlines()) + 1)), found
    assert not list(rule("made_up.py", list(ast.walk(ast.parse(right)))))


def test_blocks_for_types_are_counted(monkeypatch):
    monkeypatch.setattr(house, "ALLOWED_LATE_IMPORTS", {})
    monkeypatch.setattr(house, "TYPE_CHECKING_BLOCKS", 1)
    one = module_of("from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import torch\n")
    assert list(house.late_imports([one])) == []
    assert list(house.late_imports([one, one])) == [("proxima", "2 blocks `if TYPE_CHECKING`, at most 1")]


def test_every_campaign_has_a_small_sibling(siblings):
    """`make test` leaves campaigns out; of each, it runs a test that fails with the same fault."""
    small = {test for test, sibling in siblings.items() if sibling is None}
    small |= {test.partition("[")[0] for test in small}
    files = {test.partition("::")[0] for test in small}
    for campaign, sibling in siblings.items():
        if sibling and sibling.partition("::")[0] in files:  # all are, but where pytest was given a few files
            assert sibling in small, f"the sibling of {campaign} is no small test"


TIME_OF_DAY = {  # modules that read the clock that can be set, and what for
    "model/chat/template_inputs.py": "templates show today's date",
    "rollout/episodes/formats/completions.py": "`created` of an answer",
    "rollout/episodes/formats/responses.py": "`created_at` of an answer",
    "rollout/episodes/sessions.py": "of lines of a log",
    "runtime/state/folder.py": "since when a run is in use, for people",
    "runtime/watch/clock.py": "`wall`, for people",
    "view/trackers/mlflow.py": "of the points of a curve",
    "proxima_tinker/service_app.py": "a seed",
    "proxima_tinker/steady_time.py": "once, when the process begins",
}
SET_BY_PEOPLE = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def reads_of_the_time_of_day(nodes):
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node).replace("datetime.datetime", "datetime") in SET_BY_PEOPLE
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if f"time.{alias.name}" in SET_BY_PEOPLE)


def test_no_wait_and_no_age_is_measured_by_a_clock_that_can_be_set():
    """It jumps by hours: a deadline would pass at once, or never; a file be deleted before its time."""
    found = {name_of(path): set(reads_of_the_time_of_day(modules()[path].nodes)) for path in SOURCES}
    assert {name for name, reads in found.items() if reads} == set(TIME_OF_DAY)
    wrong = "from time import time, sleep\nend = time() + 5\nlate = datetime.now(UTC) > end or time.time() > 3"
    assert [*reads_of_the_time_of_day(ast.walk(ast.parse(wrong)))] == ["time.time", "datetime.now", "time.time"]


def test_no_name_says_old():
    """It hides which of the policies is meant: behavior, proximal, or the version before."""
    collected = []
    for path in SOURCES:
        nodes = modules()[path].nodes
        named = (getattr(node, field, None) for node in nodes for field in ("id", "arg", "attr", "name"))
        names = {name for name in named if isinstance(name, str)}
        collected += [f"{name_of(path)}: {name}" for name in sorted(names) if re.search(r"(^|_)old(_|$)", name)]
    assert not collected


OF_PROXIMA = {"bubblewrap", "reasoning_gym"}  # kinds of other slots here: a sandbox of code, a task and a reward
WRITES_RECIPES = {
    "prime_rl_environments",
    "prime_rl_evaluation",
    "prime_rl_mix",
    "prime_rl_sources",
    "skyrl",
}  # of these peers, whose environments are all of one kind


def test_a_kind_is_known_by_name_in_its_package_alone():
    """It answers for itself; a package outside then has the same rights."""
    project = tomllib.loads((ROOT / "packages/proxima-worlds/pyproject.toml").read_text())["project"]
    kinds = {kind for group in project["entry-points"].values() for kind in group} - OF_PROXIMA
    assert {"verifiers", "harbor", "container"} <= kinds
    collected = []
    for path in SOURCES:
        if "proxima_worlds" in path.parts or path.stem in WRITES_RECIPES:
            continue
        texts = {node.value for node in modules()[path].nodes if isinstance(node, ast.Constant)}
        names = {getattr(node, field, None) for node in modules()[path].nodes for field in ("id", "attr", "arg")}
        collected += [f"{name_of(path)}: {kind}" for kind in sorted(kinds & (texts | names))]
        words = re.findall(r"\w+", path.read_text(encoding="utf-8").lower())
        collected += [f"{name_of(path)}: {kind}" for kind in sorted((kinds - {"container"}) & set(words))]
    assert not collected


def test_nothing_is_unpickled():
    for path in SOURCES:
        assert not imported(path) & {"pickle", "dill", "joblib", "shelve"}, name_of(path)
        assert "torch.load(" not in path.read_text(encoding="utf-8"), name_of(path)


def test_a_room_says_what_it_is_who_may_import_it_and_how_to_add_one():
    for path in ROOMS:
        text = ast.get_docstring(modules()[path].tree) or ""
        assert "Imports:" in text and "Imported by" in text, f"{path}: say what the room imports, and who imports it"
        assert "To add" in text, f"{path}: say how to add one"


@pytest.mark.parametrize("room", ["data", "core"])
def test_the_mathematics_imports_torch_and_the_standard_library_only(room):
    allowed = sys.stdlib_module_names | {"torch", "proxima"} | ({"numpy"} if room == "data" else set())
    for path in (ROOT / "src" / "proxima" / room).rglob("*.py"):
        assert imported(path) <= allowed, name_of(path)


def test_the_reference_is_what_the_code_says():
    """`make docs` writes it."""
    pages = {make_docs.REFERENCE: make_docs.reference()}
    pages |= {make_docs.REFERENCE.parent / page: make_docs.with_metrics(page) for page in make_docs.METRICS}
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run make docs"
        assert page == make_docs.REFERENCE or text.count(make_docs.MADE) == 1


IMPORT_ALL = """
import importlib, importlib.abc, json, pkgutil, sys
import proxima

OPTIONAL = set(sys.argv[1].split())

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
failed = {}
for module in pkgutil.walk_packages(proxima.__path__, "proxima."):
    if module.name.endswith("__main__") or "in_server" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""
OPTIONAL = (
    "datasets reasoning_gym bm25s math_verify PIL peft torchao gguf accelerate matplotlib pandas uvicorn starlette ray"
)
NEED_AN_EXTRA = {
    "proxima.api.metrics_frame": "pandas",
    "proxima.cli.serving": "starlette",
    "proxima.model.adapters.merged_lora": "peft",
    "proxima.system.bounded_server": "uvicorn",
    "proxima.reward.server.scorer_app": "starlette",
    "proxima.rollout.episodes.agent_player": "starlette",
    "proxima.rollout.episodes.endpoint": "starlette",
    "proxima.rollout.episodes.session_routes": "starlette",
    "proxima.view.microscope.app": "starlette",
    "proxima.view.microscope.server": "uvicorn",
}


@pytest.mark.slow
def test_what_needs_an_extra():
    """Without any extra all other modules load, so that an import at the top of a file can't make one mandatory."""
    words = f"{OPTIONAL} starlette ray trackio wandb tensorboard mlflow"
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == NEED_AN_EXTRA


BESIDES = {"proxima_tinker": ("[lora,serve]", ["tinker>=0.38", "protobuf>=4.21"])}  # what others need of the rest


def test_the_distributions_are_of_one_version():
    for package in (proxima_peers, proxima_plan, proxima_tinker, proxima_worlds):
        assert package.__version__ == proxima.__version__
        folder = ROOT / "packages" / package.__name__.replace("_", "-")
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras, others = BESIDES.get(package.__name__, ("", []))
        assert project["dependencies"] == [f"proxima-rl{extras}=={proxima.__version__}", *others]


@pytest.mark.slow
def test_constraints_pin_everything_that_is_asked_for():
    projects = [tomllib.loads(file.read_text())["project"] for file in PROJECTS]
    wanted = [x for project in projects for x in project["dependencies"]]
    wanted += [x for extra in projects[0]["optional-dependencies"].values() for x in extra]
    names = {re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-") for requirement in wanted} - {"proxima-rl"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert names <= {line.partition("==")[0].lower().replace("_", "-") for line in lines}
