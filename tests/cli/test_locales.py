"""Every command works in the locales C, POSIX and that of Latin-1, and without a home folder."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.campaigns import campaign
from tests.tiny import CHAT_TEMPLATE

ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # else Python takes UTF-8 where the locale is C
LOCALES = {"C": {"LC_ALL": "C", **ASCII}, "POSIX": {"LC_ALL": "POSIX", **ASCII}, "coerced": {"LC_ALL": "C"}}
LOCALES["no home"] = {"LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "XDG_CACHE_HOME": "/proc/nowhere"}
LATIN = "en_US.ISO-8859-1"
ROWS = (
    ("Où est né Gödel ? Réponds « ß ».", "ß"),
    ("日本語の質問ですか?", "é"),
    ("naïve – „quoted“ ½", "½"),
    ("emoji 🙂?", "ü"),
)
RECIPE = """\
# Übung: „kleine“ Aufgabe
model: {path: model, dtype: float32, max_length: 256}
task: {kind: jsonl, path: rows.jsonl}
data: {system: "Réponds – s’il te plaît: ½ ß 日本"}
reward: [{kind: function, path: "./letters.py:letters"}, {kind: format, pattern: "é|ß"}]
algorithm: grpo
sampling: {max_tokens: 6}
train: {steps: 2, prompts_per_step: 2, completions_per_prompt: 2}
eval: {task: {kind: jsonl, path: rows.jsonl}}
runtime: {threads: 1}
"""
SFT = """\
model: {path: model, dtype: float32, max_length: 256}
task: {kind: jsonl, path: rows.jsonl}
sft: {loss_on: completion}
train: {steps: 1, examples_per_step: 2}
runtime: {threads: 1}
"""
LETTERS = """\
# «é»
def letters(prompt, completion):
    print("ça marche – 日本")
    return sum(c.isalpha() for c in completion.text) / 6
"""
RUN = "exécution"
FEW = (["explain", "récipe.yaml"], ["train", "récipe.yaml", f"folder={RUN}"], ["eval", RUN, "récipe.yaml"])
MORE = (
    ["train", RUN, "--resume", "train.steps=3"],
    ["train", "sft.yaml", "folder=sft-é"],
    ["explain", "récipe.yaml", "--all"],
    ["explain", "récipe.yaml", "--yaml"],
    ["generate", RUN, "Où est né Gödel ? 日本"],
    ["compare", RUN, RUN],
    ["view", RUN, "--export", "1"],
    ["plot", "threshold", RUN, "--out", "dessin é.svg"],
    ["check", RUN],
    ["export", RUN, "sortie é"],
    ["reward", "score", "rows.jsonl", "--reward", "récipe.yaml", "--completion", "answer"],
    ["init", "neuf é"],
    ["list", "surrogates"],
    ["doctor"],
    ["--help"],
)


@pytest.fixture
def place(tmp_path, tiny_model):
    """A folder whose name is not ASCII, with the files of a recipe of other letters."""
    folder = tmp_path / "dossier é"
    folder.mkdir()
    shutil.copytree(tiny_model("llama"), folder / "model")
    template = "{# « é » 日本 #}" + CHAT_TEMPLATE
    (folder / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    rows = [json.dumps({"question": q, "answer": a}, ensure_ascii=False) for q, a in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "récipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "sft.yaml").write_text(SFT, encoding="utf-8")
    (folder / "letters.py").write_text(LETTERS, encoding="utf-8")
    return folder


def codes(place, commands, **variables):
    """The exit code of each command, in a process of this locale; 0 for all, else its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    environment |= variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-m", "tests.cli.locale_commands", json.dumps(commands)]
    done = subprocess.run(line, capture_output=True, cwd=place, env=environment, check=False)
    said = done.stderr.decode(errors="replace")
    return json.loads(said.splitlines()[-1]), said


@pytest.mark.slow
def test_a_run_in_a_locale_of_ascii(place):
    found, said = codes(place, FEW, **LOCALES["C"])
    assert set(found.values()) == {0}, said
    metrics = [json.loads(line) for line in (place / RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len([record for record in metrics if record["kind"] == "train"]) == 2


@pytest.mark.parametrize(
    "name", campaign("tests/cli/test_locales.py::test_a_run_in_a_locale_of_ascii", [*LOCALES, LATIN])
)
def test_every_command_in_every_locale(place, name, tmp_path):
    variables = LOCALES.get(name)
    if variables is None:
        if shutil.which("localedef") is None:
            pytest.skip("no localedef")
        subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / name], check=False)
        variables = {"LC_ALL": name, "LOCPATH": str(tmp_path)}
    found, said = codes(place, FEW + MORE, **variables)
    assert {words: code for words, code in found.items() if code} == {}, said
