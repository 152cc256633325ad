"""One optimizer step, from trajectories to weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from proxima.core.loss import Aggregate, Correction, Penalty, Surrogate, policy_loss
from proxima.core.metrics import Metrics, merge
from proxima.core.precompute import Precomputed, needs_precompute, precompute
from proxima.core.proximal import interpolated_proximal
from proxima.data import PackedBatch, PolicyBatch, Trajectory, UserError
from proxima.data.columns import Bools, Floats
from proxima.model import Policy, TokenOutputs
from proxima.train.micro_batch import micro_batches, tokens_fed
from proxima.train.optimizer import AdamW, learning_rate_factor

Proximal = Literal["given", "first_forward", "loglinear"]


@dataclass(frozen=True)
class TrajectoryFacts:
    """What the first forward said of one trajectory, a value a token: kept for the rollouts' Parquet."""

    log_prob: Floats
    keep: Bools
    entropy: Floats | None = None


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
        surrogate, aggregate, corrections, penalties: the loss, see `proxima.core.policy_loss`.
        optimizer: spec with `build`.
        total_updates, warmup, schedule, final_lr_ratio: see `learning_rate_factor`.
        max_grad_norm: global norm; 0 is off.
        tokens_per_micro_batch: budget of one forward.
        skip_zero_advantage: leave out trajectories whose advantage is exactly 0; they stay in the denominator, so no
            gradient changes. Applies only when the surrogate says that a zero advantage is inert, there is no penalty,
            and nothing looks at the whole batch.
        proximal: `given` by the trajectories (the behavior policy where they say nothing); `first_forward`, the policy
            that this very update starts from (`proximal: recompute` with one update a step), by its own forward,
            detached; `loglinear`, interpolated between behavior and current policy by the token's age
            (`core.proximal`).
        entropy: report the policy's entropy; costs one more pass over the logits.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        surrogate: Surrogate,
        aggregate: Aggregate,
        corrections: Sequence[Correction] = (),
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
        proximal: Proximal = "given",
    ) -> None:
        self.policy = policy
        self.surrogate, self.aggregate = surrogate, aggregate
        self.corrections, self.penalties = tuple(corrections), tuple(penalties)
        self.prepares = needs_precompute(surrogate, self.corrections)
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = (optimizer or AdamW()).build(self.parameters)
        self.peak = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.total_updates, self.warmup, self.schedule, self.final_lr_ratio = (
            total_updates,
            warmup,
            schedule,
            final_lr_ratio,
        )
        self.max_grad_norm = max_grad_norm
        self.tokens_per_micro_batch = tokens_per_micro_batch
        # statistics over the whole batch must see every token of it
        self.skip_zero_advantage = (
            skip_zero_advantage and surrogate.zero_advantage_inert and not (self.penalties or self.prepares)
        )
        self.entropy_gradient = any("entropy" in penalty.needs for penalty in self.penalties)
        self.entropy_first = "entropy" in surrogate.needs or any("entropy" in spec.needs for spec in self.corrections)
        self.entropy = entropy or self.entropy_first
        self.proximal = proximal
        self.updates = 0

    @torch.no_grad()
    def log_prob(self, trajectories: Sequence[Trajectory], policy: Policy | None = None) -> list[Floats]:
        """Log-probs of the response tokens, nats, at each trajectory's temperature, no gradient; of the present
        weights, or of `policy`."""
        policy = policy or self.policy
        out: list[Floats] = []
        for rows in self._cut(trajectories):
            batch = policy.pack([trajectories[i] for i in rows])
            values = policy(batch).log_prob
            out.extend(part.numpy() for part in values.cpu().split(batch.cu_seqlens.diff().tolist()))
        return out

    def update(
        self,
        updates: Sequence[Sequence[int]],
        trajectories: Sequence[Trajectory],
        progress: Callable[[int, int], None] | None = None,
        version: int = 0,
        planned: int = 0,
    ) -> UpdateResult:
        """Make one optimizer step for each entry of `updates`, in order.

        Args:
            updates: indices into `trajectories`; an index may stand in several (epochs).
            trajectories: with advantage and behavior log-probs; `proximal_log_prob` and `reference_log_prob` where the
                loss needs them.
            progress: told (tokens done, tokens in all) after each micro-batch.
            version: of the present weights; only `proximal: loglinear` looks at it.
            planned: updates that the schedule of the learning rate counts for this call, where `updates` has fewer: a
                batch that was not full moves the schedule on as a full one.

        Each micro-batch's numerator is divided by the denominator of its whole update before the backward pass, so no
        split into micro-batches changes a gradient.

        Raises:
            ValueError: the loss lacks a tensor; `FloatingPointError`: the gradient norm is not finite; the weights are
                then as before.
        """
        self.optimizer.zero_grad(set_to_none=True)  # an update that was refused half-way left its gradient
        plan = [self._plan(rows, trajectories) for rows in updates]
        total = sum(tokens for _, _, tokens in plan)
        result = UpdateResult(metrics={})
        metrics: list[Metrics] = []
        norms: list[Tensor] = []
        skipped = 0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for number, (rows, active, _) in enumerate(plan):
            before = len(metrics)
            skipped += sum(len(trajectories[i].tokens) > 0 for i in rows) - len(active)
            prepared = self._prepare([trajectories[i] for i in active], version) if self.prepares and active else None
            if prepared is None:
                denominator = self._denominator([trajectories[i] for i in rows])
            else:
                denominator = self._divisor(prepared.batch.loss_mask, prepared.batch.cu_seqlens)
                metrics.append(prepared.metrics)
            for cut in self._cut([trajectories[i] for i in active]):
                members = [active[i] for i in cut]
                batch = self.policy.pack([trajectories[i] for i in members])
                decided = None if prepared is None else prepared.batch.take(cut)
                loss_sum += self._backward(batch, decided, denominator, members, metrics, result, version)
                result.tokens += len(batch.tokens)
                if progress:
                    progress(result.tokens, total)
            for found in (
                metrics[before:] if number else ()
            ):  # the policy has moved: what differs is no longer engine and trainer alone
                found.pop("rollout_replay_logp_absdiff_mean", None)
            norms.append(self._step())
        self.updates += max(0, planned - len(plan))
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
        active = [i for i in rows if not self.skip_zero_advantage or trajectories[i].advantage.any()]
        active = [i for i in active if len(trajectories[i].tokens)]
        shared = self.policy.share_prompt
        cuts = self._cut([trajectories[i] for i in active])
        tokens = sum(tokens_fed([trajectories[active[i]] for i in cut], share_prompt=shared) for cut in cuts)
        return list(rows), active, tokens

    def _cut(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        return micro_batches(trajectories, self.tokens_per_micro_batch, share_prompt=self.policy.share_prompt)

    def _denominator(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Of the whole update, from masks alone: those that are skipped count too."""
        masks = (np.ones(len(t.tokens), bool) if t.loss_mask is None else t.loss_mask for t in trajectories)
        mask = torch.from_numpy(np.concatenate([np.empty(0, bool), *masks]))
        lengths = torch.tensor([len(item.tokens) for item in trajectories], dtype=torch.long)
        cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self._divisor(mask, cut).to(self.policy.device)

    def _divisor(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        denominator = self.aggregate.denominator(loss_mask, cu_seqlens)
        return torch.where(denominator == 0, torch.ones_like(denominator), denominator)

    @torch.no_grad()
    def _prepare(self, trajectories: Sequence[Trajectory], version: int) -> Precomputed:
        """Run all of an update's tokens forward, so that what depends on the whole batch is decided before it is
        split."""
        parts = []
        for cut in self._cut(trajectories):
            batch = self.policy.pack([trajectories[i] for i in cut])
            parts.append(self._policy_batch(batch, self.policy(batch, entropy=self.entropy_first), version))
        return precompute(PolicyBatch.cat(parts), surrogate=self.surrogate, correction=self.corrections)

    def _policy_batch(self, batch: PackedBatch, outputs: TokenOutputs, version: int) -> PolicyBatch:
        """What the loss reads, with the proximal policy that was asked for."""
        if self.proximal == "first_forward":
            batch = replace(batch, proximal_log_prob=outputs.log_prob.detach())
        elif self.proximal == "loglinear":
            if batch.behavior_log_prob is None or batch.policy_version is None:
                raise UserError(
                    "proximal=loglinear needs behavior_log_prob and policy_version of every trajectory; the engine "
                    "gives both."
                )
            between = interpolated_proximal(batch.behavior_log_prob, outputs.log_prob, batch.policy_version, version)
            batch = replace(batch, proximal_log_prob=between)
        return batch.policy_batch(outputs.log_prob, outputs.entropy, outputs.top_k_log_prob)

    def _backward(
        self,
        batch: PackedBatch,
        decided: PolicyBatch | None,
        denominator: Tensor,
        members: Sequence[int],
        metrics: list[Metrics],
        result: UpdateResult,
        version: int,
    ) -> Tensor:
        outputs = self.policy(batch, entropy=self.entropy, entropy_gradient=self.entropy_gradient)
        if decided is None:
            policy_batch = self._policy_batch(batch, outputs, version)
        else:
            policy_batch = replace(
                decided, log_prob=outputs.log_prob, entropy=outputs.entropy, top_k_log_prob=outputs.top_k_log_prob
            )
        loss = policy_loss(
            policy_batch,
            surrogate=self.surrogate,
            aggregate=self.aggregate,
            correction=self.corrections or None,
            penalty=self.penalties or None,
        )
        value = loss.numerator / denominator
        value.backward()
        metrics.append(loss.metrics)
        lengths = batch.cu_seqlens.diff().tolist()
        columns = [outputs.log_prob.detach(), loss.keep]
        columns += [] if outputs.entropy is None else [outputs.entropy.detach()]
        for member, *parts in zip(members, *(column.cpu().split(lengths) for column in columns), strict=True):
            if member not in result.facts:
                result.facts[member] = TrajectoryFacts(*(part.numpy() for part in parts))
        return value.detach()

    def _step(self) -> Tensor:
        """Clip, step, schedule. An update without any backward still steps: moments decay just as with a gradient of
        zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the gradient norm is {float(norm)} at update {self.updates + 1}; the weights are as before it"
            )
        if self.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        factor = learning_rate_factor(
            self.updates,
            total=self.total_updates,
            warmup=self.warmup,
            schedule=self.schedule,
            final_ratio=self.final_lr_ratio,
        )
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.detach()

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name (`exp_avg/<parameter>` …) and JSON facts; `load` takes them back. The weights are the
        policy's own."""
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
            raise UserError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
        fused = bool(
            self.optimizer.defaults.get("fused")
        )  # a fused optimizer wants its step counts beside the weights, others on the CPU
        for name, value in tensors.items():
            key, _, owner = name.partition("/")
            if owner not in parameters or (value.dim() and value.shape != parameters[owner].shape):
                raise UserError(
                    f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have"
                )
            slot = self.optimizer.state[parameters[owner]]
            slot[key] = value.to(parameters[owner].device if value.dim() or fused else "cpu", copy=True)
        self.updates = int(facts["updates"])
