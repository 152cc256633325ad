"""`proxima.core` in loops that are not ours: plain PyTorch always, TRL where it is installed."""

from pathlib import Path

import pytest
import torch

from examples import core_in_plain_pytorch as plain
from proxima.core import Cppo

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_plain_pytorch_fits_on_two_screens_and_imports_torch_only():
    text = (EXAMPLES / "core_in_plain_pytorch.py").read_text()
    assert len(text.splitlines()) <= 120
    imports = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports == {"argparse", "torch", "proxima"}


@pytest.mark.slow
def test_plain_pytorch_learns_to_count(capsys):
    history = plain.train(steps=40)
    assert history[0]["reward"] < 0.15  # one place in ten is right by chance
    assert history[-1]["reward"] > 0.7
    assert max(m["masked_fraction"] for m in history) > 0.01  # the surrogate had something to do
    assert capsys.readouterr().out.count("step ") == 4


@pytest.mark.slow
def test_plain_pytorch_is_a_function_of_its_seed():
    runs = [plain.train(steps=2, seed=seed, verbose=False) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.fixture
def trl_run(tmp_path, tiny_model):
    """`trl_run(trainer class, surrogate, **config)` trains a tiny model for two updates and gives its weights and
    log."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    def run(cls, surrogate=None, **config):
        folder = tiny_model("llama")
        arguments = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 8,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "optim": "sgd",  # Adam would hide a wrong denominator
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 3,
            **config,
        }
        trainer = cls(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": [f"Count from {i}" for i in range(8)]}),
        )
        if surrogate is not None:
            trainer.surrogate = surrogate
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        moved = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}
        return moved, trainer.state.log_history

    return run


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_bounds_it_is_trls_own_update(trl_run, accumulation):
    """delta = inf is -A r: TRL's `dapo` with a clip that never acts. The same weights after four updates, so the same
    denominators."""
    from trl import GRPOTrainer

    from examples.core_in_trl import CppoTrainer

    unbounded = Cppo(delta=float("inf"), delta_b=float("inf"))
    ours, log = trl_run(CppoTrainer, unbounded, gradient_accumulation_steps=accumulation)
    theirs, _ = trl_run(
        GRPOTrainer, None, gradient_accumulation_steps=accumulation, loss_type="dapo", epsilon=1e6, epsilon_high=1e6
    )
    assert max(float(change.abs().max()) for change in theirs.values()) > 1e-4
    for name, change in theirs.items():
        torch.testing.assert_close(ours[name], change, rtol=1e-4, atol=1e-7)
    assert all(entry["proxima/masked_fraction"] == 0 for entry in log if "loss" in entry)


@pytest.mark.slow
def test_bounds_act_in_trl(trl_run):
    from examples.core_in_trl import CppoTrainer

    loose, _ = trl_run(CppoTrainer, Cppo(delta=float("inf"), delta_b=float("inf")), learning_rate=1.0)
    tight, log = trl_run(CppoTrainer, Cppo(delta=1e-3, delta_b=0.0), learning_rate=1.0)
    assert max(entry.get("proxima/masked_fraction", 0) for entry in log) > 0
    assert any(not torch.equal(tight[name], loose[name]) for name in tight)
