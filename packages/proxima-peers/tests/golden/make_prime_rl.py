"""Makes prime_rl.json: what prime-rl's losses of RL compute, through its `compute_loss`.

Run it where `prime_rl.trainer.rl.loss` can be imported (this project does not need it):

    python make_prime_rl.py COMMIT

A configuration is read by attribute, so any object with the options does. `eps` was named `ipo_threshold` up to
2026-08-27, when `default_loss_fn` (DPPO) was removed and `ipo_loss_fn` became the default.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from prime_rl.trainer.rl import loss as theirs

LENGTHS = (7, 6, 12, 5, 1)
BAND = {"eps": 0.3, "adv_tau": 1.0, "kl_tau": 0.0}
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "band": ("ipo_loss_fn", BAND),
    "band/before 2026-09-18": ("ipo_loss_fn", BAND | {"eps": 0.1, "kl_tau": 1e-3}),
    "band/narrow": ("ipo_loss_fn", BAND | {"eps": 0.02, "kl_tau": 0.05}),
    "band/0": ("ipo_loss_fn", BAND | {"eps": 1e-12, "kl_tau": 0.1}),
    "band/all kept": ("ipo_loss_fn", BAND | {"eps": 1.0}),
    "band/advantage halved": ("ipo_loss_fn", BAND | {"adv_tau": 0.5, "kl_tau": 1e-3}),
    "dppo": ("default_loss_fn", {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}),
    "dppo/apart": ("default_loss_fn", {"dppo_mask_low": 0.05, "dppo_mask_high": 0.1, "adv_tau": 1.0, "kl_tau": 0.02}),
}


def record(number: int, name: str, function: str, options: dict[str, float], commit: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(number)

    def uniform(length: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(length, generator=draw, dtype=torch.float64)

    inference = [uniform(length, -2.5, -0.05) for length in LENGTHS]
    trainer = [(row + uniform(len(row), -1.2, 1.2)).clamp(max=-1e-3).requires_grad_() for row in inference]
    masks = [torch.rand(length, generator=draw) < 0.8 for length in LENGTHS]
    masks[3][:] = False  # a sequence without a loss token
    middle = 0.0 if function == "ipo_loss_fn" else 0.4  # its DPPO counts 0 as negative, which `is_masked` alone shows
    advantages = [
        torch.full((length,), value, dtype=torch.float64)
        for length, value in zip(LENGTHS, (1.5, middle, -0.7, 2.0, 1.0), strict=True)
    ]
    scale = int(sum(mask.sum() for mask in masks))
    config = SimpleNamespace(**options, ipo_threshold=options.get("eps"))
    loss, metrics = theirs.compute_loss(
        trainer_logprobs=trainer,
        inference_logprobs=inference,
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=masks,
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=lambda inputs: getattr(theirs, function)(inputs, config),
        rl_scale=scale,
        ce_scale=1,
        ref_kl_scale=1,
    )
    gradient = torch.autograd.grad(loss, trainer)
    rows = {"trainer_logprobs": trainer, "inference_logprobs": inference, "advantages": advantages}
    inputs = {key: [row.tolist() for row in value] for key, value in rows.items()}
    return {
        "name": f"prime_rl/{name}",
        "source": f"prime-rl {commit} {function}",
        "dtype": "float64",
        "inputs": inputs | {"loss_mask": [mask.int().tolist() for mask in masks], "rl_scale": scale},
        "params": options,
        "expected": {
            "loss": loss.item(),
            "grad_logp": [row.tolist() for row in gradient],
            "metrics": {key: values.tolist() for key, values in metrics.items()},
        },
    }


if __name__ == "__main__":
    records = [record(number, name, *case, sys.argv[1]) for number, (name, case) in enumerate(CASES.items())]
    text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in records)
    Path(__file__).with_name("prime_rl.json").write_text(f"[\n{text}\n]\n")
