"""One completion on its way to the trainer: host side, one row of a packed batch."""

from dataclasses import dataclass, replace
from typing import Any

from proxima.data.flow import Completion, Prompt

PER_TOKEN = (
    "behavior_log_prob",
    "policy_version",
    "loss_mask",
    "sampled",
    "proximal_log_prob",
    "reference_log_prob",
    "top_k",
    "behavior_top_k_log_prob",
)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Prompt, response and every per-token fact the update needs, before packing.

    Args:
        prompt_tokens: token ids the response is conditioned on; at least one.
        tokens: response token ids, T of them; T may be 0.
        group: the same number for completions of one prompt. Trajectories of a group have equal `prompt_tokens`.
        temperature: the sampling temperature; the trainer divides its logits by it; > 0.
        behavior_log_prob, policy_version: T values, from the engine.
        advantage: one number for the whole response, reward units.
        loss_mask, sampled: T booleans; None is all True.
        top_k, behavior_top_k_log_prob: T rows of K, from an engine that was asked for them.
        proximal_log_prob, reference_log_prob: T values where a forward was run for them; None otherwise.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    group: int
    temperature: float = 1.0
    behavior_log_prob: tuple[float, ...] | None = None
    policy_version: tuple[int, ...] | None = None
    advantage: float = 0.0
    loss_mask: tuple[bool, ...] | None = None
    sampled: tuple[bool, ...] | None = None
    proximal_log_prob: tuple[float, ...] | None = None
    reference_log_prob: tuple[float, ...] | None = None
    top_k: tuple[tuple[int, ...], ...] | None = None
    behavior_top_k_log_prob: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError(
                "Trajectory.prompt_tokens: empty; the first response token would have nothing to be predicted from."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"Trajectory.temperature={self.temperature} must be > 0: a greedy completion has no log-probs to "
                "train on."
            )
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != len(self.tokens):
                raise ValueError(f"Trajectory.{name}: {len(value)} values for {len(self.tokens)} tokens.")

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)

    def with_(self, **changes: Any) -> "Trajectory":
        """A copy with some fields replaced."""
        return replace(self, **changes)

    @classmethod
    def of(
        cls, prompt: Prompt, completion: Completion, *, group: int, advantage: float, behavior: str = "untruncated"
    ) -> "Trajectory":
        """A single-turn completion; `behavior` says which of the engine's two log-probs is μ."""
        log_prob = completion.untruncated_log_prob if behavior == "untruncated" else completion.behavior_log_prob
        return cls(
            prompt_tokens=prompt.tokens,
            tokens=completion.tokens,
            group=group,
            temperature=completion.temperature,
            behavior_log_prob=log_prob,
            policy_version=completion.policy_version,
            top_k=completion.top_k,
            behavior_top_k_log_prob=completion.top_k_log_prob,
            advantage=advantage,
        )
