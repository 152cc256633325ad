"""Makes trl_grpo_options.json: what TRL's GRPOTrainer computes under the options that its defaults leave off.

Run it in an environment that has trl 1.16 (this project does not need it):  python make_trl_grpo_options.py
The loss method is called on a stub that hands it the log-probs, so no model is involved.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from trl import __version__
from trl.trainer.grpo_trainer import GRPOTrainer

ROWS, WIDTH = 6, 12
LENGTHS = (1, 12, 5, 8, 3, 10)
CASES: dict[str, dict[str, Any]] = {
    "delta/token": {"delta": 1.5},
    "delta/sequence": {"delta": 1.5, "level": "sequence", "loss_type": "bnpo"},
    "entropy/token": {"quantile": 0.3, "loss_type": "dapo", "beta": 0.04},
    "off_policy/sampler": {"off_policy": 0.05, "sampler": True, "loss_type": "dr_grpo"},
    "unbiased_kl/token": {"beta": 0.04, "unbiased": True},
    "unbiased_kl/sequence": {"beta": 0.04, "unbiased": True, "level": "sequence"},
    "sampler_ratio/token": {"ratio": "token", "loss_type": "dapo"},
    "sampler_ratio/token/sequence_loss": {"ratio": "token", "level": "sequence", "loss_type": "luspo"},
    "sampler_ratio/vespo": {"ratio": "token", "loss_type": "vespo"},
    "token_advantages": {"token_advantages": True, "level": "sequence", "loss_type": "sapo"},
    "accumulation": {"accumulation": 4, "steps_per_generation": 2, "loss_type": "cispo", "epsilon_high": 5.0},
}


class OneProcess:
    """What the loss asks of an accelerator."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    gather_for_metrics = gather

    def pad_across_processes(self, x: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def record(number: int, name: str, o: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(number)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)

    old = -3 * torch.rand(ROWS, WIDTH, generator=draw, dtype=torch.float64) - 0.05
    log_prob, reference, sampler = ((old + normal(scale)).clamp(max=-1e-3) for scale in (0.3, 0.3, 0.4))
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    entropy, advantage = normal(1.0).abs(), normal(1.0)
    advantage = advantage if o.get("token_advantages") else advantage[:, 0]
    inputs = {
        "logp": log_prob,
        "behavior_logp": old,
        "mask": mask.double(),
        "entropies": entropy,
        "advantages": advantage,
    }
    theirs: dict[str, Any] = {name: torch.zeros(ROWS, 1, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    theirs |= {
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": old,
    }
    theirs["num_items_in_batch"] = torch.tensor(50)
    if o.get("beta"):
        inputs["reference_logp"] = theirs["ref_per_token_logps"] = reference
    if o.get("sampler"):
        inputs["sampling_logp"] = theirs["sampling_per_token_logps"] = sampler
    if o.get("ratio"):
        ratio = torch.where(mask.bool(), (old - sampler).exp().clamp(max=3.0), 1.0)
        inputs["importance_sampling_ratio"] = theirs["importance_sampling_ratio"] = ratio
    args = {
        "delta": o.get("delta"),
        "use_bias_correction_kl": o.get("unbiased", False),
        "steps_per_generation": o.get("steps_per_generation", 1),
    }
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    params = {
        "loss_type": o.get("loss_type", "grpo"),
        "beta": o.get("beta", 0.0),
        "epsilon_low": 0.2,
        "epsilon_high": o.get("epsilon_high", 0.28),
        "importance_sampling_level": o.get("level", "token"),
        "top_entropy_quantile": o.get("quantile", 1.0),
        "off_policy_mask_threshold": o.get("off_policy"),
        "use_vllm": "ratio" in o,
        "vllm_importance_sampling_correction": "ratio" in o,
        "max_completion_length": WIDTH,
        "current_gradient_accumulation_steps": o.get("accumulation", 1),
    }
    stub = SimpleNamespace(
        **params,
        args=SimpleNamespace(**args),
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    leaf = log_prob.clone().requires_grad_()
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropy, None)
    for method in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(stub, method, getattr(GRPOTrainer, method))
    stub.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, stub)
    loss = GRPOTrainer._compute_loss(stub, None, theirs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    metrics = {key: value for key, (value,) in stub._metrics["train"].items()}
    return {
        "name": f"trl/grpo_options/{name}",
        "source": f"trl {__version__} GRPOTrainer._compute_loss",
        "dtype": "float64 (mask int64)",
        "inputs": {key: value.tolist() for key, value in inputs.items()} | {"num_items_in_batch": 50},
        "params": {**params, "args": args, "training": True},
        "expected": {"loss": loss.item(), "grad_logp": gradient.tolist(), "metrics": metrics},
    }


if __name__ == "__main__":
    made = [
        json.dumps(record(number, name, options), separators=(",", ":"))
        for number, (name, options) in enumerate(CASES.items())
    ]
    Path(__file__).with_name("trl_grpo_options.json").write_text("[\n" + ",\n".join(made) + "\n]\n")
