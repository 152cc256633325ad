"""The divergence of each token of a run, and the trust region that follows from it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxima.config.resolution import resolve
from proxima.config.sections.algorithm import AlgorithmConfig
from proxima.core.surrogate.cppo import Cppo
from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.policy_batch import PolicyBatch
from proxima.runtime.state.folder import existing_run
from proxima.runtime.state.rollouts import read_table
from proxima.runtime.state.stored_completions import numpy_columns

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True, kw_only=True)
class TrainedCompletion:
    """A completion for which the trainer ran a forward pass."""

    step: int
    prompt_uid: int
    sample: int
    behavior_log_prob: Floats  # [T] float32, nats, of μ
    log_prob: Floats  # [T] float32, nats, of π at the trainer's first forward
    advantage: Floats  # [T] float32, reward units

    @property
    def divergence(self) -> Floats:
        """[T] |π − μ| of the sampled tokens, the method's D."""
        far: Floats = np.abs(np.exp(self.log_prob) - np.exp(self.behavior_log_prob))
        return far


def read_trained(folder: Path, step: int | None = None) -> list[TrainedCompletion]:
    """The completions of a run, or of one of its steps, that have both log-probs.

    Raises: UserError for an unknown run or step, or if nothing in it was trained.
    """
    run = existing_run(folder)
    files = sorted(run.rollouts.glob("*.parquet"))
    if step is not None:
        numbers = [int(file.stem) for file in files]
        if step not in numbers:
            if numbers:
                steps = f"it has {numbers[0]} to {numbers[-1]}"
            else:
                steps = "it has none yet"
            raise UserError(f"--step {step}: {folder} has no such step; {steps}")
        files = [run.rollout_file(step)]
    completions = [completion for file in files for completion in _of_file(file)]
    if not completions:
        why = "all were dropped, or their advantage was 0"
        raise UserError(f"{folder}: no completion has a forward pass of the trainer; {why}")
    return completions


def _of_file(path: Path) -> Iterator[TrainedCompletion]:
    scalars = ("step", "prompt_uid", "sample", "advantage")
    lists = ("behavior_log_prob", "log_prob", "token_advantage")
    table = read_table(path, [*scalars, *lists])
    columns = {name: numpy_columns(table.column(name)) for name in lists}
    for i, row in enumerate(table.select(scalars).to_pylist()):
        behavior = columns["behavior_log_prob"][i]
        log_prob = columns["log_prob"][i]
        advantage = columns["token_advantage"][i]
        if behavior is None or log_prob is None or not len(log_prob):
            continue
        mean = row.pop("advantage")  # of the completion; its tokens may have separate advantages
        if advantage is None:
            advantage = np.full(len(log_prob), mean or 0.0, np.float32)
        yield TrainedCompletion(**row, behavior_log_prob=behavior, log_prob=log_prob, advantage=advantage)


def as_batch(completions: Sequence[TrainedCompletion]) -> PolicyBatch:
    """The completions as the batch that a surrogate reads, float64."""

    def packed(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(item, name) for item in completions])).double()

    lengths = [len(item.log_prob) for item in completions]
    return PolicyBatch(
        log_prob=packed("log_prob"),
        behavior_log_prob=packed("behavior_log_prob"),
        advantage=packed("advantage"),
        loss_mask=torch.ones(sum(lengths), dtype=torch.bool),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths])),
    )


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """The part of a run's config that is read."""

    algorithm: AlgorithmConfig


def read_algorithm(folder: Path, *, import_code: bool) -> AlgorithmConfig:
    """Return the algorithm of a run; ConfigError if it names classes outside proxima and `import_code` is not set."""
    return resolve(folder, root=StoredConfig, import_code=import_code).config.algorithm


def measurable(surrogate: Any) -> Cppo | None:
    """`surrogate` if it has thresholds that follow from the log-probs of the sampled tokens alone, else None."""
    if not isinstance(surrogate, Cppo):
        return None
    if surrogate.divergence != "binary_tv" or surrogate.delta == math.inf:
        return None
    return surrogate


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """CPPO's thresholds from the divergences of a policy that no trust region has constrained.

        δ_b = P90 of D over all tokens              δ = the (1 − share) quantile of Z = w D

    so that the smallest budget covers nine in ten tokens, and a single token's threshold stops `share` of them. The
    method calibrates its budget by the 90th percentile on a base model (arXiv 2606.10968, Eq. 22); the rule for δ is
    ours.
    """

    completions: int  # number measured
    tokens: int
    quantiles: dict[float, float]  # of D, by level
    delta: float  # the calibrated thresholds
    delta_b: float
    masked: float  # share of the tokens that they would mask, if every advantage pushed further away from μ
    masked_now: float  # the same with the thresholds of `spec`
    spec: Cppo  # the surrogate of the recipe, or the default

    @classmethod
    def of(cls, completions: Sequence[TrainedCompletion], spec: Cppo, share: float) -> "Calibration":
        """Calibrate the thresholds on these completions; `share` in (0, 1)."""
        batch = as_batch(completions)
        divergence = np.concatenate([item.divergence for item in completions]).astype(np.float64)
        weighted = spec.threshold(batch)[0].numpy()
        delta = float(f"{np.quantile(weighted, 1 - share):.2g}")
        delta_b = float(f"{np.quantile(divergence, 0.9):.2g}")
        delta = max(delta, 1e-6)  # if engine and trainer agree bit for bit, any threshold would do
        return cls(
            completions=len(completions),
            tokens=len(divergence),
            quantiles={level: float(np.quantile(divergence, level)) for level in QUANTILES},
            delta=delta,
            delta_b=delta_b,
            masked=masked_share(batch, Cppo(delta=delta, delta_b=delta_b, w_min=spec.w_min)),
            masked_now=masked_share(batch, spec),
            spec=spec,
        )


def masked_share(batch: PolicyBatch, spec: Cppo) -> float:
    """The share of tokens with Z_t > c_t."""
    weighted, allowed = spec.threshold(batch)
    return float((weighted > allowed).double().mean())
