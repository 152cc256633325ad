"""Three whole updates on stored rollouts, through TRL's and verl's real trainers and through ours: the same weights.

tests/golden/whole_update.npz has a tiny Llama's weights, 16 rollouts, and what GRPOTrainer.train (TRL 1.16) and
DataParallelPPOActor.update_policy (verl 0.7.0) made of them in three updates on the same batch: model, loss,
aggregation, clipping and AdamW, all in float32. The behavior log-probs are not the model's: ratios differ from 1 at the
first update, and at the third up to nine in ten tokens are clipped.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.core import PENALTIES, Gspo, Importance, PpoClip, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from proxima.data.trajectory import Trajectory
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.optimizer import AdamW, Schedule
from proxima.training.stack import TrainStack

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "whole_update.npz")
META = json.loads(GOLDEN["meta"].tobytes())


def k3(**fields):
    return {"penalties": [PENALTIES["k3"](coefficient=0.05, **fields)]}


CASES = {
    "trl_grpo": {"surrogate": PpoClip(), "aggregate": SequenceMeanTokenMean()},
    "trl_dapo": {"surrogate": PpoClip(epsilon_high=0.28), "aggregate": TokenMean()},
    "trl_bnpo_kl": {"surrogate": PpoClip(), "aggregate": TokenMean(), **k3(unbiased=True)},
    "trl_sequence": {"surrogate": Gspo(epsilon_low=0.05, epsilon_high=0.1), "aggregate": SequenceMeanTokenMean()},
    "verl_token_mean": {"surrogate": PpoClip(epsilon_high=0.28, dual_clip=3.0), "aggregate": TokenMean()},
    "verl_seq_mean_token_sum_kl": {"surrogate": PpoClip(dual_clip=3.0), "aggregate": SequenceMeanTokenSum(), **k3()},
    "verl_seq_mean_token_mean_is": {
        "surrogate": PpoClip(dual_clip=3.0),
        "aggregate": SequenceMeanTokenMean(),
        "corrections": [Importance(level="token", bound="truncate", upper=2.0)],
    },
    "verl_gspo": {"surrogate": Gspo(epsilon_low=0.05, epsilon_high=0.1), "aggregate": SequenceMeanTokenMean()},
}


def weights(name):
    return {key.removeprefix(f"{name}/"): GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{name}/")}


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaForCausalLM(LlamaConfig(**META["config"])).float()
    made.load_state_dict({key: torch.from_numpy(value) for key, value in weights("before").items()})
    return LoadedModel(model=made, tokenizer=None, path="tiny")


def trajectories(*, weighted, reference):
    """The stored rollouts. verl takes weights as they are; ours follow from μ, so there μ = π_prox / w."""
    for row in META["rollouts"]:
        old = np.array(row["behavior_log_prob"], np.float32)
        behavior = old - np.log(np.array(row["weight"], np.float32)) if weighted else old
        assert (behavior <= 0).all()
        yield Trajectory(
            group=row["group"],
            prompt_tokens=row["prompt_tokens"],
            tokens=row["tokens"],
            behavior_log_prob=behavior,
            proximal_log_prob=old,
            reference_log_prob=np.array(row["reference_log_prob"], np.float32) if reference else None,
            advantage=np.float32(row["advantage"]),
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget"), [*((name, 20) for name in sorted(CASES)), ("trl_grpo", 4096)])
def test_three_updates_give_the_peers_weights(name, budget):
    case = CASES[name]
    policy = Policy(model())
    stack = TrainStack(
        policy,
        optimizer=AdamW(lr=META["lr"], eps=META["eps"]),
        schedule=Schedule("constant"),
        max_grad_norm=META["max_grad_norm"],
        tokens_per_micro_batch=budget,
    )
    items = list(trajectories(weighted="corrections" in case, reference="penalties" in case))
    result = stack.update(PolicyObjective(**case), [items] * META["updates"])
    assert result.updates == META["updates"]
    ours = dict(policy.model.named_parameters())
    theirs, before = weights(name), weights("before")
    assert ours.keys() == theirs.keys() == before.keys()
    moved = max(np.abs(theirs[key] - before[key]).max() for key in before)
    assert moved > 2.9 * META["lr"]  # three full steps of Adam
    for key, value in theirs.items():
        # In units of the learning rate: Adam turns a gradient's sign into a step, so a wrong gradient shows as 1.
        apart = np.abs(ours[key].detach().numpy() - value).max() / META["lr"]
        assert apart < 3e-3, (key, apart)
