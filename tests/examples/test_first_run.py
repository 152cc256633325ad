"""examples/first_run.ipynb in a real Jupyter kernel, on a tiny model; and the stop button."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a kernel on a busy machine
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_run.ipynb"


BUDGET = {  # of a run that takes seconds
    "model.compute_dtype": "float32",
    "engine.dtype": "float32",
    "train.steps": 2,
    "train.prompts_per_step": 2,
    "train.completions_per_prompt": 4,
    "reward": ["number", {"kind": "format", "pattern": "[!-?]", "weight": 0.1}],  # no random answer is right
    "train.updates_per_step": 1,
    "train.warmup_steps": 0,
    "eval.limit": 4,
    "task.size": 20,
    "runtime.threads": 1,
}
TOLD = {  # what a cell prints or shows
    "proxima.train(RECIPE, BUDGET)": ["step   1/2", "step   2/2", "done: 2 steps in", "<run runs/quickstart-"],
    "subplots": ["image/png"],
    '"label"': ["before", "after", "text/html"],
    "random_state": ["What is", "outcome"],
    "gaps": ["completions trained on"],
    "from my_reward": ["reward", "correct"],
    "proxima.evaluate": ["mean@4", "arithmetic"],
    "run.report": ["report.html"],
}
STOP = """
import os, pathlib, signal, threading, time
def press():
    while not list(pathlib.Path('run').glob('rollouts/000002.parquet')): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
proxima.train(RECIPE, {**BUDGET, 'folder': 'run', 'train.steps': 10**6})
"""
STOPPED = """
run = proxima.load_run('run')
print(run.status, len(run.metrics) >= 2, (run.model() / 'config.json').exists())
"""


@pytest.fixture(scope="module")
def cells(tiny_model, tmp_path_factory):
    """The cells of the notebook, and one in which the stop button is pressed: the kernel gets SIGINT within it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = f"RECIPE = 'quickstart'\nBUDGET = {BUDGET | {'model.path': str(tiny_model('llama'))}!r}"
    right = "0.2 * (answer in text)"
    (reward,) = [cell for cell in notebook.cells if right in cell.source]
    reward.source = reward.source.replace(right, f"{right} + 0.01 * (len(text) % 5)")  # no random answer is right
    assert not any(cell.get("outputs") for cell in notebook.cells)  # nothing in the repository that may be stale
    expected = {"tags": ["raises-exception"]}
    notebook.cells += [nbformat.v4.new_code_cell(STOP, metadata=expected), nbformat.v4.new_code_cell(STOPPED)]
    folder = tmp_path_factory.mktemp("notebook")
    resources = {"metadata": {"path": str(folder)}}
    # What a kernel prints arrives in pieces, cut wherever its timer flushes: put together again.
    nbclient.NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=resources).execute()
    assert len(list((folder / "runs").iterdir())) == 2 and len(list((folder / "evals").iterdir())) == 1
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.campaign("tests/api/test_python.py::test_a_run_in_tables")
def test_what_the_cells_show(cells):
    for word, expected in TOLD.items():
        output = next(json.dumps(cell.outputs) for cell in cells if word in cell.source)
        assert all(text in output for text in expected), (word, output)


@pytest.mark.slow
@pytest.mark.campaign("tests/api/test_python.py::test_ctrl_c_writes_a_checkpoint_and_a_resume_ends_as_an_unbroken_run")
def test_the_stop_button_of_a_notebook(cells):
    """A checkpoint is written, and the cell ends in a KeyboardInterrupt."""
    error, after = cells[-2].outputs[-1], cells[-1].outputs[0]
    assert (error.ename, after.text) == ("KeyboardInterrupt", "stopped True True\n")
    assert "with a checkpoint; proxima.train('run', resume=True) continues it" in error.evalue
