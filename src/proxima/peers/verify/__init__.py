"""Verification: golden records of other implementations, run through ours, each with a verdict.

A record (JSON: name, source, dtype, inputs, params, expected) is what a peer computed from given inputs. Its source and
parameters choose our spec and its fields; the verdict comes from the numbers alone:

    matched        ours within the tolerance of the record's dtype
    differs
    not ours, but exactly what a documented peculiarity of the peer gives; its id is named (`docs/peculiarities.md`)
    failed         neither
    unsupported    nothing of ours computes this, or not all of it

Every expected number is compared, metrics included, or the record is `unsupported`; `record.BESIDE` lists the few kinds
of leaves that are no numbers of anybody's algorithm. Where a peer defines a metric in its own way, the adapter computes
that from our primitives.

Imports: torch, stdlib, the rest of `proxima.core`; `proxima.core` does not import it. Used by `proxima verify` and the
golden tests.
To add a peer: a file of adapters, each a generator of attempts (ours first, then one a peculiarity), and a line in
`ADAPTERS`.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.peers.verify import (
    areal,
    pruning,
    trl,
    trl_advantage,
    trl_preference,
    unirl,
    verl,
    verl_advantage,
    verl_rollout,
)
from proxima.peers.verify.record import Attempt, Record, Verdict, closest, judge, uncovered

Adapter = Callable[[Record], Iterator[Attempt]]

# The first line whose words all stand in the record's source decides.
ADAPTERS: tuple[tuple[tuple[str, ...], Adapter], ...] = (
    (("AReaL", "ppo_actor_loss_fn"), areal.ppo),
    (("AReaL", "sapo_loss_fn"), areal.sapo),
    (("AReaL", "_apply_m2po_masking"), areal.second_moment),
    (("AReaL", "compute_prox_logp_approximations"), areal.proximal),
    (("AReaL", "_compute_advantages"), areal.advantages),
    (("AReaL", "masked_normalization"), areal.masked_normalization),
    (("AReaL", "Normalization"), areal.normalization),
    (("AReaL", "ppo_critic_loss_fn"), areal.critic),
    (("AReaL", "KLEstimator"), areal.kl),
    (("CPPO@", "advantage block"), pruning.advantage),
    (("CPPO@", "pruning block"), pruning.select),
    (("UniRL", "compute_loss_and_backward"), unirl.losses),
    (("UniRL", "normalizers"), unirl.normalizers),
    (("DPPOTrainer",), trl.dppo),
    (("PPOTrainer", "reward+GAE"), trl_advantage.ppo_rewards),
    (("PPOTrainer", "loss block"), trl.ppo_loss),
    (("GMPOTrainer",), trl.gmpo),
    (("vLLM importance sampling",), trl.vllm_correction),
    (("GRPOTrainer", "advantage block"), trl_advantage.advantages),
    (("RLOOTrainer", "advantage block"), trl_advantage.rloo_advantages),
    (("GRPOTrainer._compute_loss",), trl.grpo),
    (("RLOOTrainer._compute_loss",), trl.rloo),
    (("DPOTrainer",), trl_preference.dpo),
    (("KTOTrainer",), trl_preference.kto),
    (("RewardTrainer",), trl_preference.reward),
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
    (("core_algos.compute_", "advantage"), verl_advantage.advantages),
)


def verify_record(raw: dict[str, Any]) -> Verdict:
    """The verdict on one record, as read from JSON. A record we cannot read is `unsupported`, with what we did not
    understand."""
    record = Record.of(raw)
    adapter = next((found for words, found in ADAPTERS if all(word in record.source for word in words)), None)
    if adapter is None:
        return Verdict(record.name, "unsupported", f"no adapter for source {record.source!r}")
    try:
        verdict = judge(record.name, adapter(record))
    except KeyError as error:
        return Verdict(record.name, "unsupported", f"no reading of {error.args[0]!r} in {record.source!r}")
    if verdict.status == "unsupported":
        return Verdict(record.name, "unsupported", f"no reading of {record.params}")
    missing = uncovered(record, verdict.compared)
    if missing and verdict.status != "failed":
        return Verdict(
            record.name,
            "unsupported",
            f"no reading of the expected {', '.join(missing[:3])} in {record.source!r}",
            verdict.compared,
        )
    if verdict.status == "failed" and record.inputs.unread:  # what nobody read may be the reason: no claim either way
        return Verdict(
            record.name,
            "unsupported",
            f"no reading of the inputs {', '.join(record.inputs.unread)} in {record.source!r}",
        )
    return verdict


def verify_file(path: Path) -> list[Verdict]:
    """The verdicts on all records of a JSON file. Raises ValueError where it is not a list of records."""
    raw = json.loads(path.read_text())
    if not isinstance(raw, list):
        raise UserError(f"{path}: expected a JSON list of golden records, found {type(raw).__name__}.")
    return [verify_record(item) for item in raw]


def totals(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Counts by status: records, matched, differs, failed, unsupported."""
    counts = dict.fromkeys(("records", "matched", "differs", "failed", "unsupported"), 0)
    for verdict in verdicts:
        counts["records"] += 1
        counts[verdict.status] += 1
    return counts


__all__ = ["ADAPTERS", "Record", "Verdict", "closest", "totals", "verify_file", "verify_record"]
