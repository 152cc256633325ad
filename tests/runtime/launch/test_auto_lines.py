"""What `auto` chose is said in the first lines of a run; calls in a format that is not read are counted and named."""

import json
import shutil
from pathlib import Path

import pytest

from proxima.cli.main import main
from tests.runtime.tiny_run import recipe

pytestmark = pytest.mark.usefixtures("lent_servers")
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>'


@pytest.mark.slow
def test_calls_in_another_format_are_named(tiny_model, tmp_path, capsys):
    """A model whose template has no tools, and that writes Hermes' calls: nothing was said of them before."""
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    written = recipe(
        model,
        task__environment="calculator",
        reward=["number"],
        sampling__max_tokens=96,
        engine={"kind": "tests.scripted_calls:Scripted", "text": CALL},
        algorithm__mismatch={"on_mismatch": "warn"},
        model__attention="auto",
        eval={"task": None},
        train__steps=1,
        episode={"turns": 1},
    )
    (tmp_path / "recipe.yaml").write_text(json.dumps(written))
    main(["train", f"{tmp_path}/recipe.yaml", f"folder={tmp_path}/run"])
    log = (tmp_path / "run" / "log.txt").read_text()
    record = next(
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "episode/calls" in line
    )
    assert record["episode/calls"] == 0
    assert record["episode/unreadable"] == record["episode/unreadable/hermes"] == record["completions"]
    assert "a call is written as hermes, and read as xml" in log and "set episode.tool_format=hermes" in log
    assert "check that the environment gives a reward" not in log
    assert "auto   episode.tool_format = xml: the chat template has no tools" in log
    assert "auto   model.attention = packed: " in log
    assert "auto   engine.moves = auto: its kind does not say" in log  # a kind of somebody else's
