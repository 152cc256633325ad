"""Makes trl_distillation.json: what TRL's `generalized_jsd_loss` of GKDTrainer and of IWOPDTrainer compute.

Run it in an environment that has trl 1.16 (this project does not need it):  python make_trl_distillation.py
Both are static methods of logits, so no model is involved.
"""

import json
from pathlib import Path
from typing import Any

import torch
from trl import __version__
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

ROWS, WIDTH, VOCABULARY = 2, 4, 7
LENGTHS = (4, 2)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gkd/beta0": (GKDTrainer, {"beta": 0.0}),
    "gkd/beta0.3": (GKDTrainer, {"beta": 0.3}),
    "gkd/beta0.5": (GKDTrainer, {}),
    "gkd/beta1": (GKDTrainer, {"beta": 1.0}),
    "gkd/beta0.9/temperature": (GKDTrainer, {"beta": 0.9, "temperature": 0.7}),
    "gkd/beta1/temperature": (GKDTrainer, {"beta": 1.0, "temperature": 1.3}),
    "gkd/beta0/accumulation": (GKDTrainer, {"beta": 0.0, "num_items_in_batch": 11}),
    "iw_opd/beta0/top3": (IWOPDTrainer, {"beta": 0.0, "top_k": 3}),
    "iw_opd/beta0/top1": (IWOPDTrainer, {"beta": 0.0, "top_k": 1, "temperature": 0.7}),
    "iw_opd/beta1/top3": (IWOPDTrainer, {"beta": 1.0, "top_k": 3}),
    "iw_opd/beta1/top1": (IWOPDTrainer, {"beta": 1.0, "top_k": 1}),
    "iw_opd/beta0.3": (IWOPDTrainer, {"beta": 0.3}),
}


def record(number: int, name: str, trainer: Any, options: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(number)
    shape = (ROWS, WIDTH, VOCABULARY)
    student, teacher = (2 * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    inside = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    labels = torch.where(inside, torch.randint(VOCABULARY, (ROWS, WIDTH), generator=draw), -100)
    loss = trainer.generalized_jsd_loss(student, teacher, labels, **options)
    (gradient,) = torch.autograd.grad(loss, student)
    return {
        "name": f"trl/{name}",
        "source": f"trl {__version__} {trainer.__name__}.generalized_jsd_loss",
        "dtype": "float64",
        "inputs": {"student_logits": student.tolist(), "teacher_logits": teacher.tolist(), "labels": labels.tolist()},
        "params": options,
        "expected": {"loss": loss.item(), "grad_student_logits": gradient.tolist()},
    }


if __name__ == "__main__":
    records = [record(number, name, *case) for number, (name, case) in enumerate(CASES.items())]
    text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in records)
    Path(__file__).with_name("trl_distillation.json").write_text(f"[\n{text}\n]\n")
