"""Verification: golden records of other implementations, run through ours, each with a verdict.

A record (JSON: name, source, dtype, inputs, params, expected) is what a peer computed from given inputs. Its source and
parameters choose our spec and its fields; the verdict depends on the numbers alone:

    matched        ours within the tolerance of the record's dtype
    differs        not ours, but what our spec gives once a documented peculiarity of the peer is applied to it, in a
                   record that has what triggers it; its id is in the verdict
    failed         neither
    unsupported    nothing of ours computes this, or not all of it

Every expected number is compared, metrics included, or the record is `unsupported`; `verdict.NOT_COMPARED` lists the
few kinds of leaves that no algorithm computes. Every option is read, or declared irrelevant where the peer's own code
does not look at it; an absent one has the peer's default. Where a peer defines a metric in its own way, the adapter
computes that from our primitives. A record whose source is "by hand" names our specs itself.

Imports: torch, stdlib, `proxima.core`, `proxima.check`. Imported by `proxima verify` and the golden tests.
To add a peer: a file of adapters, each a generator of attempts (ours first; then our spec with one peculiarity, where
the record has what triggers it), and a line in `ADAPTERS`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from proxima.data import NoFieldError, UserError
from proxima_peers.verify import (
    areal,
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
from proxima_peers.verify.record import BY_HAND, Attempt, NoReading, Record
from proxima_peers.verify.verdict import RecordVerdict, Status, judge, uncovered

Adapter = Callable[[Record], Iterator[Attempt]]

# The first line whose words all occur in the record's source decides.
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


def verify_record(raw: dict[str, Any], *, import_code: bool = False) -> RecordVerdict:
    """The verdict on a record as read from JSON; `unsupported` names what we can't interpret. `import_code`: import the
    classes outside proxima that a record by hand names.

    Raises:
        UserError, NoFieldError: a record by hand names no spec, an unknown one or field, a value that the spec refuses,
            or other inputs than it reads. In a record of a peer these are `unsupported`.
    """
    record = Record.of(raw)
    if record.unknown:
        return unsupported(record, f"no reading of the keys {', '.join(record.unknown)}")
    adapter = next((found for words, found in ADAPTERS if all(word in record.source for word in words)), None)
    if adapter is None:
        return unsupported(record, f"no adapter for source {record.source!r}")
    try:
        verdict = judge(record.name, by_hand(record, import_code) if adapter is by_hand else adapter(record))
    except KeyError as error:
        return unsupported(record, f"no reading of {error.args[0]!r} in {record.source!r}")
    except NoReading as error:
        return unsupported(record, str(error))
    except (UserError, NoFieldError) as error:
        if adapter is by_hand:
            raise
        return unsupported(record, f"refused: {error}")
    if verdict.status == "unsupported":
        return unsupported(record, f"no reading of {record.params}")
    if unread := record.params.unread:
        return unsupported(record, f"no reading of the options {', '.join(unread)} in {record.source!r}")
    missing = uncovered(record, verdict.compared)
    if missing and verdict.status != "failed":
        reason = f"no reading of the expected {', '.join(missing[:3])} in {record.source!r}"
        return unsupported(record, reason, verdict.compared)
    if record.inputs.unread:
        return unsupported(record, f"no reading of the inputs {', '.join(record.inputs.unread)} in {record.source!r}")
    return verdict


def unsupported(record: Record, reason: str, compared: tuple[str, ...] = ()) -> RecordVerdict:
    return RecordVerdict(record.name, "unsupported", reason, compared)


def totals(verdicts: Sequence[RecordVerdict]) -> dict[str, int]:
    """How many records there are, and how many of each status."""
    counts = Counter(verdict.status for verdict in verdicts)
    return {"records": len(verdicts), **{status: counts[status] for status in get_args(Status)}}


__all__ = ["ADAPTERS", "Record", "RecordVerdict", "totals", "verify_record"]
