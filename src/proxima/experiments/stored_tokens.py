"""Explains why the tokens of a stored completion were kept or dropped, from its rollout row and the recipe alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core import CORRECTIONS, SURROGATES
from proxima.core.divergence import TOP_K_NEEDS
from proxima.core.hold import FACTOR
from proxima.core.loss import Correction, Surrogate
from proxima.core.proximal import VersionChain, chained_log_prob, interpolated_proximal, segment_wise_log_prob
from proxima.core.token_reasons import TokenReasons
from proxima.data.policy_batch import PolicyBatch

NOT_TRAINED = {
    "skipped_zero_advantage": "no gradient: the completion's advantage is 0, so it was not trained on",
    "critic_only": "not trained: in this step only the critic was",
    "invalid": "not trained: its score failed",
}
RECOMPUTE = "`proxima view --recompute` computes it where there is a checkpoint of the step before"


@dataclass(frozen=True, kw_only=True)
class LossSpecs:
    """The loss of a run, as specified in its recipe.

    Args:
        surrogate: None if the run has none, or if `problem` says why it is unknown.
        proximal: as in the recipe.
        problem: why the decisions about its tokens are unknown; empty if they are known.
    """

    surrogate: Surrogate | None = None
    corrections: tuple[Correction, ...] = ()
    proximal: str = "behavior"
    next_missing: str = "decoupled"
    chain: VersionChain | None = None
    first_forward: bool = True  # a recomputed `proximal` comes from the first forward of the update
    problem: str = ""

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> "LossSpecs":
        """Read the specs from the values of config.yaml. Kinds outside proxima are not imported."""
        algorithm = recipe.get("algorithm")
        train = recipe.get("train") or {}
        if not isinstance(algorithm, Mapping):
            return cls(problem="config.yaml has no algorithm")
        if algorithm.get("surrogate") is None:
            return cls(problem="the run has no surrogate: what trained it decides nothing token by token")
        try:
            corrections = algorithm.get("correction") or ()
            updates = int(train.get("updates_per_step") or 1) * int(train.get("epochs_per_step") or 1)
            chain = None
            if algorithm.get("chain") is not None:
                chain = VersionChain(**algorithm["chain"])
            return cls(
                surrogate=_made(SURROGATES, algorithm["surrogate"]),
                corrections=tuple(_made(CORRECTIONS, spec) for spec in corrections),
                proximal=str(algorithm.get("proximal") or "behavior"),
                next_missing=str(algorithm.get("next_missing") or "decoupled"),
                chain=chain,
                first_forward=updates == 1 and algorithm.get("reward_kl") is None,
            )
        except KeyError as error:
            return cls(problem=f"{error.args[0]} is not a kind of proxima, and other code is not imported here")
        except (AttributeError, TypeError, ValueError) as error:
            return cls(problem=f"config.yaml is of another version: {' '.join(str(error).split())}")

    def at_step(self, metrics: Mapping[str, Any]) -> "LossSpecs":
        """The specs with the bounds of a step, given its line of metrics.jsonl: `algorithm.hold` moves them."""
        factor = metrics.get(FACTOR)
        if factor is None or self.surrogate is None:
            return self
        return replace(self, surrogate=self.surrogate.scaled(float(factor)))

    def reads_proximal(self) -> bool:
        assert self.surrogate is not None
        if _band_reads_proximal(self.surrogate):
            return True
        return any("proximal_log_prob" in spec.needs for spec in self.corrections)


def _band_reads_proximal(surrogate: Surrogate) -> bool:
    """Return True if the band needs the proximal policy."""
    kind = SURROGATES.kind_of(surrogate)
    return kind != "reinforce" and not (
        kind in ("cppo", "dppo", "m2po", "tv_band") and "proximal" not in vars(surrogate).values()
    )


def _made(kinds: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    values = dict(fields)
    return kinds[str(values.pop("kind"))](**values)


@dataclass(frozen=True, kw_only=True)
class StoredTokens:
    """A stored completion of a step, with the decisions about its tokens.

    Args:
        row: of the rollouts, as returned by `array_rows`.
        specs: of the run. step: its number, from 1.
        recomputed: columns [T] that are not stored, by name: `proximal_log_prob`.
    """

    row: Mapping[str, Any]
    specs: LossSpecs
    step: int
    recomputed: Mapping[str, Any]

    @property
    def proximal_log_prob(self) -> Tensor | None:
        """[T] nats; None if it is neither stored nor known from other columns."""
        current = self._column("log_prob")
        behavior = self._column("behavior_log_prob")
        specs = self.specs
        if current is None or self.row.get("proximal_log_prob") is not None:
            return self._column("proximal_log_prob")
        if specs.proximal == "behavior":
            return behavior
        if specs.proximal == "loglinear" and behavior is not None:
            return interpolated_proximal(behavior, current, self._versions, self.version, check=False)
        if specs.proximal in ("recompute", "next") and specs.first_forward:
            return current
        return self._column("proximal_log_prob")

    @property
    def version(self) -> int:
        """The version of the weights at the beginning of the step."""
        return self.step - 1

    @property
    def next_log_prob(self) -> Tensor | None:
        """[T] nats, as read by the corrections; None without `proximal: next`, or if the proximal one is missing."""
        proximal = self.proximal_log_prob
        behavior = self._column("behavior_log_prob")
        if self.specs.proximal != "next" or proximal is None or behavior is None:
            return None
        cached = self._column("next_log_prob")
        if cached is None:
            cached = torch.full_like(proximal, torch.nan)
        if self.specs.chain is not None:
            steps = self._column("chained_log_ratio")
            if steps is None:
                steps = torch.full_like(proximal, torch.nan)
            columns = behavior, proximal, cached, steps, self._versions
            return chained_log_prob(*columns, self.version, self.specs.chain, check=False)
        segment_wise = segment_wise_log_prob(behavior, proximal, cached, self._versions, self.version, check=False)
        if self.specs.next_missing == "decoupled":
            return torch.where(segment_wise.isnan(), proximal, segment_wise)
        dropped = self.specs.next_missing == "drop_sample" and bool((segment_wise.isnan() & self.sampled).any())
        if dropped:
            return torch.full_like(segment_wise, torch.nan)
        return segment_wise

    @property
    def advantage(self) -> Tensor | None:
        """[T] reward units."""
        if self.row.get("token_advantage") is not None:
            return self._column("token_advantage")
        value = self.row.get("advantage")
        if value is None:
            return None
        return torch.full((len(self.row["tokens"]),), value, dtype=torch.float32)

    def problem(self) -> str:
        """Return the reason why the decisions about its tokens are unknown; empty if they are known."""
        outcome = str(self.row["outcome"])
        if outcome != "trained":
            return (
                NOT_TRAINED.get(outcome) or f"not trained: the selection {outcome.removeprefix('dropped_')} dropped it"
            )
        if self.specs.problem:
            return self.specs.problem
        if self._column("log_prob") is None:
            return "the trainer ran no forward pass of it"
        if self.specs.reads_proximal() and self.proximal_log_prob is None:
            return f"the proximal log-prob was recomputed and is not stored; {RECOMPUTE}"
        surrogate = self.specs.surrogate
        assert surrogate is not None
        read = set(surrogate.needs - TOP_K_NEEDS - {"advantage", "proximal_log_prob"})
        if "top_k" in surrogate.needs:
            read.add("top_k_divergence")
        if surrogate.whole_batch:
            read.add("selected")
        for name in sorted(read):
            if self._column(name) is None:
                return f"the surrogate reads {name}, which this run did not store"
        return ""

    def reasons(self) -> TokenReasons | None:
        """Return the decisions about its tokens; None if `problem` gives a reason."""
        if self.problem():
            return None
        current = self._column("log_prob")
        tokens = len(self.row["tokens"])
        assert current is not None and self.specs.surrogate is not None
        batch = PolicyBatch(
            log_prob=current,
            behavior_log_prob=self._column("behavior_log_prob"),
            proximal_log_prob=self.proximal_log_prob,
            next_log_prob=self.next_log_prob,
            advantage=self.advantage,
            entropy=self._column("entropy"),
            policy_version=self._versions,
            loss_mask=self.sampled,
            sampled=self.sampled,
            cu_seqlens=torch.tensor([0, tokens]),
            selected=self._mask("selected"),
            top_k_divergence=self._column("top_k_divergence"),
        )
        return TokenReasons(
            batch=batch, surrogate=self.specs.surrogate, corrections=self.specs.corrections, recorded=self._mask("keep")
        )

    @property
    def sampled(self) -> Tensor:
        """[T] bool: the tokens of an episode that are trained in this path; all tokens without an episode."""
        values = self._mask("sampled")
        if values is None:
            return torch.ones(len(self.row["tokens"]), dtype=torch.bool)
        return values

    @property
    def _versions(self) -> Tensor:
        return torch.from_numpy(np.array(self.row["policy_version"]))

    def _column(self, name: str) -> Tensor | None:
        """[T] the column of the row or, if it is not stored, the recomputed one."""
        value = self.row.get(name)
        if value is None:
            value = self.recomputed.get(name)
        if value is None:
            return None
        return torch.from_numpy(np.array(value, np.float32))

    def _mask(self, name: str) -> Tensor | None:
        value = self.row.get(name)
        if value is None:
            return None
        return torch.from_numpy(np.array(value, np.bool_))
