"""The training stack: from items and an objective to new weights. It knows no RL."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proxima.core.metrics import Metrics, merge_metrics
from proxima.data import NotFiniteError, Trajectory, UserError
from proxima.data.columns import Floats
from proxima.data.flow import Key
from proxima.model import PackedModel
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.train.forward_stage import ForwardStage, LogProbStage, stage_columns
from proxima.train.objectives.protocol import BatchStatistics, FirstForward, Objective, TokenStatistics
from proxima.train.optimizer import AdamW, Schedule

EXPLODED = 3.0  # growth of the norm of all trained weights in one update, after which little of the model is left


class OptimizerSpec(Protocol):
    """The config of an optimizer, a kind of `OPTIMIZERS`."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(kw_only=True)
class UpdateResult:
    """What a call of `TrainStack.update` did.

    Args:
        metrics: merged over micro-batches and updates, ready to be logged.
        token_statistics: by key of the trajectory, from its first forward pass; those of skipped items have none.
        tokens: tokens fed to the forward passes that had a backward pass.
        updates: optimizer steps made.
        skipped: items, over all updates, for which `Objective.skippable` saved the forward pass.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    token_statistics: dict[Key, TokenStatistics] = field(default_factory=dict)
    tokens: int = 0
    updates: int = 0
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class _Occurrence:
    """An item of an update, with its sequences; an item that an update has twice has two occurrences."""

    item: Any
    sequences: Sequence[Trajectory]

    @property
    def has_tokens(self) -> bool:
        return any(len(trajectory.tokens) for trajectory in self.sequences)


@dataclass
class _Accumulator:
    """Running sums of a call of `update`."""

    result: UpdateResult
    report: Callable[[int, int], None] | None
    total_tokens: int
    loss: Tensor
    metrics: list[Metrics] = field(default_factory=list)


class TrainStack:
    """Optimizer, learning-rate schedule, gradient clipping and micro-batches around a model.

    Args:
        model: what is trained; a `Policy` or a `ScalarModel`.
        optimizer: spec with `build`.
        schedule: of the learning rate, over the updates of the whole run.
        max_grad_norm: bound on the global gradient norm; 0 turns clipping off.
        tokens_per_micro_batch: token budget of one forward pass.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        optimizer: OptimizerSpec | None = None,
        schedule: Schedule | None = None,
        max_grad_norm: float = 1.0,
        tokens_per_micro_batch: int = 4096,
    ) -> None:
        self.model = model
        self.parameters = [p for _, p in model.named_parameters() if p.requires_grad]
        self.optimizer = (optimizer or AdamW()).build(self.parameters)
        self.peak = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.schedule = schedule or Schedule()
        self.max_grad_norm = max_grad_norm
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.updates = 0

    def log_prob(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """[T] log-probs of each response, nats, at the trajectory's temperature, under a policy's current weights."""
        return self._columns(LogProbStage("proximal_log_prob", self.model), trajectories)["proximal_log_prob"]

    def fill(self, stages: Iterable[ForwardStage], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the columns of the stages, in order; a column that all of them have is kept."""
        out = list(trajectories)
        for stage in stages:
            if any(getattr(item, stage.column) is None for item in out):
                filled = self._columns(stage, out)
                out = [_with_columns(item, {name: filled[name][i] for name in filled}) for i, item in enumerate(out)]
        return out

    def _columns(self, stage: ForwardStage, trajectories: Sequence[Trajectory]) -> dict[str, list[Floats]]:
        return stage_columns(stage, trajectories, self.tokens_per_micro_batch, share_prompt=self.model.share_prompt)

    def update(
        self,
        objective: Objective[Any],
        updates: Sequence[Sequence[Any]],
        progress: Callable[[int, int], None] | None = None,
        planned: int = 0,
        should_continue: Callable[[Sequence[Any], Metrics], bool] | None = None,
        before_first: Callable[[FirstForward], None] | None = None,
    ) -> UpdateResult:
        """Make one optimizer step for each of the `updates`, in order.

        Args:
            objective: what is minimised.
            updates: the items of each, as the objective reads them; an item may occur in several (epochs).
            progress: called with (tokens done, tokens in total) after each micro-batch.
            planned: updates that the schedule counts for this call, where fewer are made: a batch that was not full
                advances the schedule as a full one.
            should_continue: called after each update with its items and its metrics; False leaves out the rest.
            before_first: called with the statistics of the first update before its optimizer step, which is not made if
                it raises.

        Raises:
            ValueError: the loss lacks a tensor.
            NotFiniteError: a gradient norm is not finite, and the update was not made; or the weights are not, after
                an update, or it made their norm grow more than `EXPLODED` times.
        """
        before = self._weight_norm()
        self.optimizer.zero_grad(set_to_none=True)  # an update that raised half-way left its gradient behind
        occurrences = [[_Occurrence(item, objective.sequences(item)) for item in items] for items in updates]
        active = [[each for each in part if each.has_tokens] for part in occurrences]
        run = [[each for each in part if not objective.skippable(each.item)] for part in active]
        total = sum(
            tokens_fed([occurrence.sequences for occurrence in cut], share_prompt=self.model.share_prompt)
            for part in run
            for cut in self._micro_batches(part)
        )
        result = UpdateResult()
        state = _Accumulator(result, progress, total, torch.zeros((), dtype=torch.float64, device=self.model.device))
        norms = []
        for number, items in enumerate(updates):
            already = len(state.metrics)
            first = self._accumulate(objective, items, run[number], state)
            if number == 0:
                if first:
                    state.metrics.append(objective.measure_first(first, self.model.device))
                if before_first is not None:
                    before_first(first)
            norms.append(self._step())
            before = self._check_weights(before)
            result.updates += 1
            result.skipped += len(active[number]) - len(run[number])
            if should_continue is not None and not should_continue(items, merge_metrics(state.metrics[already:])):
                break
        self.updates += max(0, planned - result.updates)
        result.metrics = {key: value.value for key, value in merge_metrics(state.metrics).items()} | {
            "loss": float(state.loss) / max(1, result.updates),
            "grad_norm": float(torch.stack(norms).mean()) if norms else 0.0,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        return result

    def _accumulate(
        self, objective: Objective[Any], items: Sequence[Any], run: Sequence[_Occurrence], state: _Accumulator
    ) -> list[tuple[Trajectory, TokenStatistics]]:
        """The gradient of one update of `items`: forward and backward passes over the micro-batches of those that are
        not skipped. Returns the statistics of its trajectories."""
        # The only place that sees a whole update. With several ranks, `batch_statistics` reads the parts of all ranks
        # and the denominators are summed over ranks, here.
        statistics, row = None, dict[_Occurrence, int]()
        if objective.has_batch_statistics and run:
            statistics, row = self._batch_statistics(objective, run)
            state.metrics.append(statistics.metrics)
        denominators = [
            torch.where(d == 0, torch.ones_like(d), d).to(self.model.device)
            for d in objective.denominators(items, statistics)
        ]
        measured: list[tuple[Trajectory, TokenStatistics]] = []
        for cut in self._micro_batches(run):
            trajectories = [trajectory for occurrence in cut for trajectory in occurrence.sequences]
            batch = self.model.pack(trajectories)
            outputs = self.model(batch, objective.outputs)
            part = None if statistics is None else statistics.take([row[occurrence] for occurrence in cut])
            losses = objective.losses(batch, outputs, part)
            value = reduce(torch.add, [loss.numerator / d for loss, d in zip(losses, denominators, strict=True)])
            value.backward()
            state.loss += value.detach()
            state.metrics.extend(loss.metrics for loss in losses)
            measured += zip(trajectories, objective.token_statistics(batch, outputs, losses), strict=False)
            state.result.tokens += len(batch.tokens)
            if state.report:
                state.report(state.result.tokens, state.total_tokens)
        for trajectory, values in measured:
            state.result.token_statistics.setdefault(trajectory.key, values)
        return measured

    @torch.no_grad()
    def _batch_statistics(
        self, objective: Objective[Any], run: Sequence[_Occurrence]
    ) -> tuple[BatchStatistics, dict[_Occurrence, int]]:
        """What the objective reads off all items of an update, and the row of each item in the packs that it read."""
        sequences = [objective.statistics_sequences(occurrence.item) for occurrence in run]
        cuts, parts = self._cuts(sequences), []
        for cut in cuts:
            batch = self.model.pack([trajectory for i in cut for trajectory in sequences[i]])
            parts.append((batch, self.model(batch, objective.statistics_outputs)))
        return objective.batch_statistics(parts), {run[i]: row for row, i in enumerate(chain.from_iterable(cuts))}

    def _micro_batches(self, run: Sequence[_Occurrence]) -> list[list[_Occurrence]]:
        cuts = self._cuts([occurrence.sequences for occurrence in run])
        return [[run[i] for i in cut] for cut in cuts]

    def _cuts(self, sequences: Sequence[Sequence[Trajectory]]) -> list[list[int]]:
        return micro_batches(sequences, self.tokens_per_micro_batch, share_prompt=self.model.share_prompt)

    def _step(self) -> Tensor:
        """Clip, schedule and step.

        An update without a backward pass steps with a gradient of zero, as TRL and verl do: AdamW's momentum and weight
        decay still move the weights. So skipping advantages of exactly 0 changes no bit of any update.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFiniteError(f"the gradient norm of update {self.updates + 1} is {float(norm)}")
        if self.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        factor = self.schedule.factor(self.updates)
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.detach()

    def _weight_norm(self) -> float:
        """The norm of all trained weights; one reading pass over them."""
        return float(nn.utils.get_total_norm([p.detach() for p in self.parameters]))

    def _check_weights(self, before: float) -> float:
        """The norm of the weights, which was `before` ahead of the last update."""
        norm = self._weight_norm()
        if not math.isfinite(norm):
            raise NotFiniteError(f"the weights are NaN, infinite or too large to add up after update {self.updates}")
        if norm > EXPLODED * before > 0:
            grown = f"from {before:.3g} to {norm:.3g}"
            raise NotFiniteError(f"the norm of the weights went {grown} in update {self.updates}")
        return norm

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's tensors by name (`exp_avg/<parameter>` …) and the update count, as `load` takes them. The
        weights are not among them.

        Raises:
            NotFiniteError: one of them is not finite: its weights would never move again.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {
            f"{key}/{names[id(parameter)]}": value if isinstance(value, Tensor) else torch.tensor(value)
            for parameter, slots in self.optimizer.state.items()
            for key, value in slots.items()
        }
        if bad := next((name for name, value in tensors.items() if not bool(value.sum().isfinite())), None):
            raise NotFiniteError(f"the optimizer state {bad!r} is NaN, infinite or too large to add up")
        return tensors, {"updates": self.updates}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            UserError: the tensors belong to another model, or some are missing.
        """
        parameters = dict(self.model.named_parameters())
        kinds = {name.partition("/")[0] for name in tensors}
        trained = [name for name, p in parameters.items() if p.requires_grad]
        if missing := sorted({f"{kind}/{name}" for kind in kinds for name in trained} - tensors.keys()):
            raise UserError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} in all), which this model has")
        fused = bool(self.optimizer.defaults.get("fused"))  # its step counts lie beside the weights, others on the CPU
        for name, value in tensors.items():
            key, _, owner = name.partition("/")
            if owner not in parameters or (value.dim() and value.shape != parameters[owner].shape):
                raise UserError(
                    f"the optimizer state holds {name!r} of shape {list(value.shape)}, which this model does not have"
                )
            slot = self.optimizer.state[parameters[owner]]
            slot[key] = value.to(parameters[owner].device if value.dim() or fused else "cpu", copy=True)
        self.updates = int(facts["updates"])


def _with_columns(item: Trajectory, columns: dict[str, Any]) -> Trajectory:
    """The trajectory with columns [T, …]; one value more, that of a sentinel, is its bootstrap."""
    value, count = columns.get("value", ()), len(item.tokens)
    if len(value) > count:
        columns |= {"value": value[:count], "bootstrap": float(value[count])}
    return replace(item, **columns)
