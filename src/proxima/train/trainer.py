"""One optimizer step, from trajectories to weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from proxima.core.loss import Aggregate, Correction, Penalty, Surrogate, policy_loss
from proxima.core.metrics import Metrics, merge
from proxima.data import PackedBatch, Trajectory, pack
from proxima.model import Policy
from proxima.train.micro_batch import micro_batches
from proxima.train.optimizer import AdamW, learning_rate_factor


@dataclass(frozen=True, kw_only=True)
class TrajectoryFacts:
    """What the first forward said of one trajectory, a value a token: kept for the rollouts' Parquet."""

    log_prob: list[float]
    keep: list[bool]
    entropy: list[float] | None = None


@dataclass(kw_only=True)
class UpdateResult:
    """What `Trainer.update` did.

    Args:
        metrics: merged over micro-batches and updates; numbers are ready to be logged.
        facts: by trajectory (as numbered by the caller), from its first forward; absent for those that were skipped.
        tokens: tokens fed to the forward passes that had a backward.
        updates: optimizer steps made.
    """

    metrics: dict[str, float]
    facts: dict[int, TrajectoryFacts] = field(default_factory=dict)
    tokens: int = 0
    updates: int = 0


class Trainer:
    """Holds the optimizer; makes updates; knows nothing of prompts, rewards or files.

    Args:
        policy: what is trained.
        surrogate, aggregate, correction, penalties: the loss, see `proxima.core.policy_loss`.
        optimizer: spec with `build`.
        total_updates, warmup, schedule, final_lr_ratio: see `learning_rate_factor`.
        max_grad_norm: global norm; 0 is off.
        tokens_per_micro_batch: budget of one forward.
        skip_zero_advantage: leave out trajectories whose advantage is exactly 0; they stay in the denominator, so no gradient changes.
            Applies only when the surrogate says that a zero advantage is inert and there is no penalty.
        proximal_is_first_forward: the proximal policy is the one that this very update starts from (`proximal: recompute` with one update a
            step): its log-probs are those of the update's own forward, detached.
        entropy: report the policy's entropy; costs one more pass over the logits.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        surrogate: Surrogate,
        aggregate: Aggregate,
        correction: Correction | None = None,
        penalties: Sequence[Penalty] = (),
        optimizer: AdamW | Any = None,
        total_updates: int = 1,
        warmup: int = 0,
        schedule: str = "constant",
        final_lr_ratio: float = 0.0,
        max_grad_norm: float = 1.0,
        tokens_per_micro_batch: int = 4096,
        skip_zero_advantage: bool = True,
        entropy: bool = True,
        proximal_is_first_forward: bool = False,
    ) -> None:
        self.policy = policy
        self.surrogate, self.aggregate, self.correction, self.penalties = surrogate, aggregate, correction, tuple(penalties)
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = (optimizer or AdamW()).build(self.parameters)
        self.peak = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.total_updates, self.warmup, self.schedule, self.final_lr_ratio = total_updates, warmup, schedule, final_lr_ratio
        self.max_grad_norm = max_grad_norm
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.skip_zero_advantage = skip_zero_advantage and surrogate.zero_advantage_inert and not self.penalties
        self.entropy = entropy
        self.proximal_is_first_forward = proximal_is_first_forward
        self.updates = 0

    @torch.no_grad()
    def log_prob(self, trajectories: Sequence[Trajectory], policy: Policy | None = None) -> list[tuple[float, ...]]:
        """Log-probs of the response tokens, nats, at each trajectory's temperature, no gradient; of the present weights, or of `policy`."""
        policy = policy or self.policy
        out: list[tuple[float, ...]] = []
        for rows in self._cut(trajectories):
            batch = policy.pack([trajectories[i] for i in rows])
            values = policy(batch).log_prob
            out.extend(tuple(part.tolist()) for part in values.split(batch.cu_seqlens.diff().tolist()))
        return out

    def update(
        self, updates: Sequence[Sequence[int]], trajectories: Sequence[Trajectory], progress: Callable[[int, int], None] | None = None
    ) -> UpdateResult:
        """Make one optimizer step for each entry of `updates`, in order.

        Args:
            updates: indices into `trajectories`; an index may stand in several (epochs).
            trajectories: with advantage and behavior log-probs; `proximal_log_prob` and `reference_log_prob` where the loss needs them.
            progress: told (tokens done, tokens in all) after each micro-batch.

        Each micro-batch's numerator is divided by the denominator of its whole update before the backward pass, so no split into
        micro-batches changes a gradient.

        Raises:
            ValueError: the loss lacks a tensor; `FloatingPointError`: the gradient norm is not finite; the weights are then as before.
        """
        self.optimizer.zero_grad(set_to_none=True)  # an update that was refused half-way left its gradient
        plan = [self._plan(rows, trajectories) for rows in updates]
        total = sum(tokens for _, _, tokens in plan)
        result = UpdateResult(metrics={})
        metrics: list[Metrics] = []
        norms: list[Tensor] = []
        skipped = 0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for rows, active, _ in plan:
            skipped += sum(bool(trajectories[i].tokens) for i in rows) - len(active)
            denominator = self._denominator([trajectories[i] for i in rows])
            for cut in self._cut([trajectories[i] for i in active]):
                members = [active[i] for i in cut]
                batch = self.policy.pack([trajectories[i] for i in members])
                loss_sum += self._backward(batch, denominator, members, metrics, result)
                result.tokens += len(batch.tokens)
                if progress:
                    progress(result.tokens, total)
            norms.append(self._step())
        result.updates = len(plan)
        result.metrics = {key: value.value for key, value in merge(metrics).items()}
        result.metrics |= {
            "loss": float(loss_sum) / max(1, len(plan)),
            "grad_norm": float(torch.stack(norms).mean()) if norms else 0.0,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "skipped_zero_advantage": float(skipped),
        }
        return result

    def _plan(self, rows: Sequence[int], trajectories: Sequence[Trajectory]) -> tuple[list[int], list[int], int]:
        active = [i for i in rows if not (self.skip_zero_advantage and trajectories[i].advantage == 0)]
        active = [i for i in active if trajectories[i].tokens]
        shared = self.policy.share_prompt
        tokens = sum(
            len(pack([trajectories[active[i]] for i in cut], share_prompt=shared).tokens)
            for cut in self._cut([trajectories[i] for i in active])
        )
        return list(rows), active, tokens

    def _cut(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        return micro_batches(trajectories, self.tokens_per_micro_batch, share_prompt=self.policy.share_prompt)

    def _denominator(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Of the whole update, from masks alone: those that are skipped count too."""
        mask = [m for item in trajectories for m in (item.loss_mask or (True,) * len(item.tokens))]
        lengths = torch.tensor([len(item.tokens) for item in trajectories], dtype=torch.long)
        cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        denominator = self.aggregate.denominator(torch.tensor(mask, dtype=torch.bool), cut)
        return torch.where(denominator == 0, torch.ones_like(denominator), denominator).to(self.policy.device)

    def _backward(
        self, batch: PackedBatch, denominator: Tensor, members: Sequence[int], metrics: list[Metrics], result: UpdateResult
    ) -> Tensor:
        outputs = self.policy(batch, entropy=self.entropy)
        if self.proximal_is_first_forward:
            batch = replace(batch, proximal_log_prob=outputs.log_prob.detach())
        policy_batch = batch.policy_batch(outputs.log_prob, outputs.entropy)
        loss = policy_loss(
            policy_batch, surrogate=self.surrogate, aggregate=self.aggregate, correction=self.correction, penalty=self.penalties or None
        )
        value = loss.numerator / denominator
        value.backward()
        metrics.append(loss.metrics)
        lengths = batch.cu_seqlens.diff().tolist()
        entropy = [None] * len(lengths) if outputs.entropy is None else outputs.entropy.detach().split(lengths)
        parts = zip(members, outputs.log_prob.detach().split(lengths), loss.keep.split(lengths), entropy, strict=True)
        for member, log_prob, keep, ent in parts:
            if member not in result.facts:
                result.facts[member] = TrajectoryFacts(
                    log_prob=log_prob.tolist(), keep=keep.tolist(), entropy=None if ent is None else ent.tolist()
                )
        return value.detach()

    def _step(self) -> Tensor:
        """Clip, step, schedule. An update without any backward still steps: moments decay just as with a gradient of zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {float(norm)} at update {self.updates + 1}; the weights are as before it")
        if self.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        factor = learning_rate_factor(
            self.updates, total=self.total_updates, warmup=self.warmup, schedule=self.schedule, final_ratio=self.final_lr_ratio
        )
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.detach()

    # ---- state -----------------------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name (`exp_avg/<parameter>` …) and JSON facts; `load` takes them back. The weights are the policy's own."""
        names = {id(p): name for name, p in self.policy.model.named_parameters()}
        tensors: dict[str, Tensor] = {}
        for parameter, slots in self.optimizer.state.items():
            for key, value in slots.items():
                tensors[f"{key}/{names[id(parameter)]}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return tensors, {"updates": self.updates}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Take a state back.

        Raises:
            ValueError: the tensors are of another model, or not all there.
        """
        parameters = dict(self.policy.model.named_parameters())
        kinds = {name.partition("/")[0] for name in tensors}
        trained = [name for name, p in parameters.items() if p.requires_grad]
        if missing := sorted({f"{kind}/{name}" for kind in kinds for name in trained} - tensors.keys()):
            raise ValueError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
        fused = bool(self.optimizer.defaults.get("fused"))  # a fused optimizer wants its step counts beside the weights, others on the CPU
        for name, value in tensors.items():
            key, _, owner = name.partition("/")
            if owner not in parameters or (value.dim() and value.shape != parameters[owner].shape):
                raise ValueError(f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have")
            slot = self.optimizer.state[parameters[owner]]
            slot[key] = value.to(parameters[owner].device if value.dim() or fused else "cpu", copy=True)
        self.updates = int(facts["updates"])
