"""examples/first_run.ipynb in a real Jupyter kernel, on a tiny model; and the stop button."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a kernel on a busy machine
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_run.ipynb"


@pytest.fixture
def small(tiny_model):
    """The parameters cell of a run that takes seconds."""
    budget = {
        "model.path": str(tiny_model("llama")),
        "model.compute_dtype": "float32",
        "engine.dtype": "float32",
        "train.steps": 2,
        "train.prompts_per_step": 2,
        "train.completions_per_prompt": 2,
        "train.updates_per_step": 1,
        "train.warmup_steps": 0,
        "eval.limit": 4,
        "task.size": 20,
        "runtime.threads": 1,
    }
    return f"RECIPE = 'quickstart'\nBUDGET = {budget!r}"


def test_the_notebook_runs(small, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = small
    assert not any(cell.get("outputs") for cell in notebook.cells)  # nothing in the repository that may be stale
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.source: json.dumps(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"}
    by_name = {word: next(out for source, out in outputs.items() if word in source) for word in TOLD}
    for word, expected in TOLD.items():
        assert all(text in by_name[word] for text in expected), (word, by_name[word])
    assert len(list((tmp_path / "runs").iterdir())) == 2 and len(list((tmp_path / "evals").iterdir())) == 1


# What a cell prints or shows.
TOLD = {
    "proxima.train(RECIPE, BUDGET)": ["step   1/2", "step   2/2", "done: 2 steps in", "<run runs/quickstart-"],
    "subplots": ["image/png"],
    '"label"': ["before", "after", "text/html"],
    "random_state": ["What is", "outcome"],
    "gaps": ["completions trained on"],
    "from my_reward": ["reward", "correct"],
    "proxima.evaluate": ["mean@4", "arithmetic"],
    "run.report": ["report.html"],
}


def test_the_stop_button_of_a_notebook(small, tmp_path):
    """The kernel gets SIGINT within a cell: a checkpoint is written, and the cell ends in a KeyboardInterrupt."""
    stop = (
        "import os, signal, threading, proxima\n"
        "def press():\n"
        "    import pathlib, time\n"
        "    while not list(pathlib.Path('run').glob('rollouts/000002.parquet')): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press).start()\n"
        "proxima.train(RECIPE, {**BUDGET, 'folder': 'run', 'train.steps': 10**6})"
    )
    cells = [nbformat.v4.new_code_cell(text) for text in (small, stop)]
    after = (
        "run = proxima.load_run('run')\n"
        "print(run.status, len(run.metrics) >= 2, (run.model() / 'config.json').exists())"
    )
    cells.append(nbformat.v4.new_code_cell(after))
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    error = notebook.cells[1].outputs[-1]
    assert (error.ename, notebook.cells[2].outputs[0].text) == ("KeyboardInterrupt", "stopped True True\n")
    assert "with a checkpoint; proxima.train('run', resume=True) continues it" in error.evalue
