"""What a command says first: that it loads a model, before the libraries are imported and the model is loaded."""

import io
import subprocess
import sys

import pytest

from proxima.view.run_views import lines_to

PROGRAM = """
import sys
from proxima.cli.main import main

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":  # it takes seconds, and the models need it
            print("loading begins", flush=True)
            raise SystemExit(0)

sys.meta_path.insert(0, Watch())
main(["train", "quickstart", "model.path=" + sys.argv[1]])
"""


@pytest.mark.slow
def test_a_run_prints_it_before_transformers_is_imported(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("  checking recipe and data") and lines[1] == "loading begins", done.stderr


def test_each_stage_before_the_start_is_said_once():
    stream = io.StringIO()
    lines = lines_to(stream)
    for stage in ("load", "tokenize", "tokenize", "load"):
        lines.progress(stage, 0, 1, "models")
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["loading model", "tokenizing"]
