"""Verification: golden records of other implementations, compared with ours, each with a verdict.

A record (JSON: name, source, dtype, inputs, params, expected) contains the numbers that a peer computed from given
inputs. Its source and parameters choose our spec and its fields; the verdict depends only on the numbers:

    matched        our numbers agree within the tolerance of the record's dtype
    differs        our numbers agree only once a documented peculiarity of the peer is applied to our spec, in a record
                   that has its trigger; the verdict contains its id
    failed         neither
    unsupported    no code of ours computes this, or not all of it

Every expected number is compared, metrics included, or the record is `unsupported`; `verdict.NOT_COMPARED` lists the
few kinds of leaves that no algorithm computes. Every option is read, or declared irrelevant where the peer's own code
does not read it; an absent option has the peer's default. Where a peer defines a metric in its own way, the adapter
computes it from our primitives. A record whose source is "by hand" names our specs itself.

Imports: torch, stdlib, `proxima.core`, `proxima.laws`. Imported by `proxima peers verify` and the golden tests.
To add a peer: a file of adapters, each a generator of attempts (ours first; then our spec with one peculiarity, if the
record has its trigger), and a line in `ADAPTERS`.
"""

from collections.abc import Callable, Iterator

from proxima_peers.verify import (
    areal,
    prime_rl,
    pruning,
    trl,
    trl_actors,
    trl_advantage,
    trl_distillation,
    trl_preference,
    unirl,
    verl,
    verl_advantage,
    verl_rollout,
)
from proxima_peers.verify.by_hand_adapter import by_hand
from proxima_peers.verify.record import BY_HAND, Attempt, Record

Adapter = Callable[[Record], Iterator[Attempt]]

# The first line whose words all occur in the record's source is used.
ADAPTERS: tuple[tuple[tuple[str, ...], Adapter], ...] = (
    ((BY_HAND,), by_hand),
    (("AReaL", "ppo_actor_loss_fn"), areal.ppo),
    (("AReaL", "sapo_loss_fn"), areal.sapo),
    (("AReaL", "_apply_m2po_masking"), areal.second_moment),
    (("AReaL", "compute_prox_logp_approximations"), areal.proximal_interpolation),
    (("AReaL", "_compute_advantages"), areal.areal_advantages),
    (("AReaL", "masked_normalization"), areal.masked_normalization),
    (("AReaL", "Normalization"), areal.normalization),
    (("AReaL", "ppo_critic_loss_fn"), areal.critic_loss),
    (("AReaL", "KLEstimator"), areal.kl_estimate),
    (("CPPO@", "advantage block"), pruning.pruning_advantages),
    (("CPPO@", "pruning block"), pruning.pruned_selection),
    (("prime-rl", "loss_fn"), prime_rl.policy_losses),
    (("UniRL", "compute_loss_and_backward"), unirl.losses),
    (("UniRL", "normalizers"), unirl.normalizers),
    (("DPPOTrainer",), trl_actors.dppo),
    (("PPOTrainer", "reward+GAE"), trl_advantage.ppo_rewards),
    (("PPOTrainer", "loss block"), trl_actors.ppo_loss),
    (("GMPOTrainer",), trl_actors.gmpo),
    (("vLLM importance sampling",), trl_actors.vllm_correction),
    (("GRPOTrainer", "advantage block"), trl_advantage.trl_advantages),
    (("RLOOTrainer", "advantage block"), trl_advantage.rloo_advantages),
    (("GRPOTrainer._compute_loss",), trl.grpo),
    (("GSPOTokenTrainer._compute_loss",), trl.grpo),
    (("RLOOTrainer._compute_loss",), trl_actors.rloo),
    (("DPOTrainer",), trl_preference.dpo_loss),
    (("generalized_jsd_loss",), trl_distillation.distillation),
    (("KTOTrainer",), trl_preference.kto),
    (("RewardTrainer",), trl_preference.reward_model_loss),
    (("mismatch_helper",), verl_rollout.pr3694),
    (("verl 0.7", "rollout_corr_helper"), verl_rollout.version07),
    (("rollout_corr_helper",), verl_rollout.version09),
    (("core_algos.compute_policy_loss",), verl.policy),
    (("core_algos.agg_loss",), verl.aggregation),
    (("core_algos.compute_value_loss",), verl.value_loss),
    (("core_algos.kl_penalty",), verl.kl_penalty),
    (("AdaptiveKLController",), verl.adaptive_kl),
    (("apply_kl_penalty",), verl.kl_in_reward),
    (("torch_functional.masked",), verl.whitening),
    (("core_algos.compute_", "advantage"), verl_advantage.verl_advantages),
)
