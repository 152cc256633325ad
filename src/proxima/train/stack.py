"""The training stack: from items and an objective to new weights. It knows no RL."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics, merge_metrics, on_host
from proxima.data import NotFiniteError, Trajectory
from proxima.data.columns import Floats
from proxima.data.flow import Key
from proxima.model import LoadedModel, PackedModel
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.train.forward_stage import ColumnShare, ForwardStage, LogProbStage, stage_columns
from proxima.train.objectives.protocol import BatchStatistics, FirstForward, Measured, Objective, TokenStatistics
from proxima.train.optimizer import AdamW, Schedule
from proxima.train.ranks import ALONE, Ranks, SharedProblem, moved, split
from proxima.train.update_share import Occurrence, UpdateShare, WholeUpdate, by_occurrence, in_order

if TYPE_CHECKING:
    from proxima.train.one_pass_adamw import OnePassAdamW

POLICY = "policy"  # the name of a run's first stack
LEAST_COMPILED = 1 << 20  # number of trained weights from which a compiled step pays off
EXPLODED = 3.0  # growth of the norm of all trained weights in one update that has destroyed the model


class OptimizerSpec(Protocol):
    """The config of an optimizer, a kind of `OPTIMIZERS`. One that distinguishes parameters by name also has
    `build_named(pairs)`, with the names in the model."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(kw_only=True)
class UpdateResult:
    """The result of a call of `TrainStack.update`.

    Args:
        metrics: merged over micro-batches and updates, ready to be logged.
        token_statistics: by key of the trajectory, from its first forward pass; skipped items have none.
        tokens: tokens fed to the forward passes that had a backward pass.
        updates: optimizer steps made.
        skipped: items, over all updates, for which `Objective.skippable` saved the forward pass.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    token_statistics: dict[Key, TokenStatistics] = field(default_factory=dict)
    tokens: int = 0
    updates: int = 0
    skipped: int = 0


@dataclass
class _Accumulator:
    """Running sums of a call of `update`, on this rank."""

    result: UpdateResult
    report: Callable[[int, int], None] | None
    total_tokens: int
    loss: Tensor
    metrics: list[Metrics] = field(default_factory=list)


class TrainStack:
    """Optimizer, learning-rate schedule, gradient clipping and micro-batches around a model.

    Args:
        model: the model to train; a `Policy` or a `ScalarModel`.
        optimizer: spec with `build`.
        schedule: of the learning rate, over the updates of the whole run.
        max_grad_norm: bound on the global gradient norm; 0 turns clipping off.
        on_zero_gradient: what an update does whose gradient is exactly 0, for instance because every advantage is:
            `skip` leaves weights and optimizer as they are, `step` lets momentum and weight decay move the weights, as
            TRL and verl do. The schedule counts it in both.
        tokens_per_micro_batch: token budget of one forward pass.
        ranks: the processes that share each update; rank 0 calls the methods, and the others follow its calls.
        name: identifies the stack to the other ranks.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        optimizer: OptimizerSpec | None = None,
        schedule: Schedule | None = None,
        max_grad_norm: float = 1.0,
        on_zero_gradient: str = "skip",
        tokens_per_micro_batch: int = 4096,
        ranks: Ranks = ALONE,
        name: str = POLICY,
    ) -> None:
        self.model, self.ranks, self.name = model, ranks, name
        self.parameters = [p for _, p in model.named_parameters() if p.requires_grad]
        self.optimizer = _built(optimizer or AdamW(), model)
        self.peak = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.schedule = schedule or Schedule()
        self.max_grad_norm, self.on_zero_gradient = max_grad_norm, on_zero_gradient
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.updates = 0
        self._one_pass = _one_pass(self.optimizer, model, ranks)
        self._plain: LoadedModel | None = None  # on rank 0 of several
        self._gathers = False

    def log_prob(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """[T] log-probs of each response, nats, at the trajectory's temperature, under a policy's current weights."""
        return self.columns(LogProbStage("proximal_log_prob", self.model), trajectories)["proximal_log_prob"]

    def fill(self, stages: Iterable[ForwardStage], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the columns of the stages, in order; a column that all of them have is kept."""
        out = list(trajectories)
        for stage in stages:
            if any(getattr(item, stage.column) is None for item in out):
                filled = self.columns(stage, out)
                out = [_with_columns(item, {name: filled[name][i] for name in filled}) for i, item in enumerate(out)]
        return out

    def columns(self, stage: ForwardStage, trajectories: Sequence[Trajectory]) -> dict[str, list[Floats]]:
        """The columns that a stage fills, [T, …] of each trajectory."""
        order = _packing_order([(trajectory,) for trajectory in trajectories])
        by_name, places = self._columns(stage, [trajectories[i] for i in order]), sorted(order, key=order.__getitem__)
        return {name: [values[i] for i in places] for name, values in by_name.items()}

    def _columns(self, stage: ForwardStage, trajectories: Sequence[Trajectory]) -> dict[str, list[Floats]]:
        if self.ranks.size == 1 or getattr(stage, "on_rank_zero", False):
            return stage_columns(stage, trajectories, self.tokens_per_micro_batch, share_prompt=self.model.share_prompt)
        parts = self._split([(trajectory,) for trajectory in trajectories])
        filler = min(trajectories, key=len, default=None)
        shares = [ColumnShare(stage.column, [trajectories[i] for i in part], filler) for part in parts]
        with self.ranks.call(self.name, "columns", self.ranks.dealt(shares)) as share:
            columns = self.follow_columns(stage, share)
        out: dict[str, list[Any]] = {name: [None] * len(trajectories) for part in columns for name in part}
        for places, part in zip(parts, columns, strict=True):
            for name, values in part.items():
                for place, value in zip(places, values, strict=True):
                    out[name][place] = value
        return out

    def late_stages(self, make: Callable[[], Sequence[ForwardStage]]) -> Sequence[ForwardStage]:
        """Stages that are created in the middle of a run, by every rank at once: loading their models is collective."""
        with self.ranks.call(self.name, "stages", [None] * self.ranks.size):
            return make()

    def follow_columns(self, stage: ForwardStage, share: ColumnShare) -> list[dict[str, list[Floats]]]:
        """Fill a share of the columns; on rank 0, all shares."""
        budget, share_prompt = self.tokens_per_micro_batch, self.model.share_prompt
        own = stage_columns(
            stage, share.trajectories, budget, share_prompt=share_prompt, ranks=self.ranks, filler=share.filler
        )
        return self.ranks.gather_shares(own)

    def gathered(self, device: torch.device | str = "cpu") -> LoadedModel:
        """The whole trained model with its current weights, for engines: the model itself, or on several ranks a copy
        on rank 0. The first call creates that copy, on `device`."""
        if self.ranks.size == 1:
            return self.model.loaded
        with self.ranks.call(self.name, "gather", [None] * self.ranks.size):
            self.follow_gather(device)
        assert self._plain is not None
        return self._plain

    def follow_gather(self, device: torch.device | str = "cpu") -> None:
        """Gather the weights of all ranks on the first."""
        from proxima.model.parallel.gather import gather_into, plain_copy

        if self._gathers:
            gather_into(self.model.model, None if self._plain is None else self._plain.model)
        else:
            self._plain, self._gathers = plain_copy(self.model.loaded, device), True

    def release(self) -> None:
        """Return unused device memory, on every rank, to other processes on the device."""
        with self.ranks.call(self.name, "release", [None] * self.ranks.size):
            self.follow_release()

    def follow_release(self) -> None:
        """Release the memory of this rank; no effect if it has not used a GPU."""
        torch.cuda.empty_cache()

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
            objective: the loss to minimise.
            updates: the items of each, as the objective reads them; an item may occur in several (epochs).
            progress: called with (tokens done, tokens in total) after each micro-batch.
            planned: updates that the schedule counts for this call, if fewer are made: a batch that was not full
                advances the schedule like a full one.
            should_continue: called after each update with its items and its metrics; False skips the rest.
            before_first: called with the statistics of the first update before its optimizer step, which is skipped if
                the call raises.

        Raises:
            ValueError: the loss lacks a tensor.
            NotFiniteError: a gradient norm is not finite, and the update was not made; or after an update the weights
                are not finite, or their norm has grown more than `EXPLODED` times.
        """
        occurrences = [[Occurrence(item, objective.sequences(item)) for item in items] for items in updates]
        active = [[each for each in part if each.has_tokens] for part in occurrences]
        kept = [[each for each in part if not objective.skippable(each.item)] for part in active]
        run = [[part[i] for i in _packing_order([each.sequences for each in part])] for part in kept]
        parts = [self._split([each.sequences for each in part]) for part in run]
        whole = WholeUpdate(updates, run, parts, progress, should_continue, before_first)
        shares = [
            UpdateShare(
                objective,
                [[part[i].item for i in places[place]] for part, places in zip(run, parts, strict=True)],
                judged=should_continue is not None,
                planned=planned,
            )
            for place in range(self.ranks.shares)
        ]
        own = [[part[i] for i in places[0]] for part, places in zip(run, parts, strict=True)]
        with self.ranks.call(self.name, "update", self.ranks.dealt(shares)) as share:
            result = self._update(share, own, whole)
        skipped = [len(part) - len(rest) for part, rest in zip(active, run, strict=True)]
        result.skipped = sum(skipped[: result.updates])
        return result

    def follow_update(self, share: UpdateShare) -> None:
        """Compute this rank's share of rank 0's `update`, on the other ranks.

        Raises:
            Refused: rank 0 has ended the call before its first step.
            NotFiniteError: as `update`, on every rank.
        """
        sequences = share.objective.sequences
        self._update(share, [[Occurrence(item, sequences(item)) for item in part] for part in share.updates], None)

    def _update(
        self, share: UpdateShare, own: Sequence[Sequence[Occurrence]], whole: WholeUpdate | None
    ) -> UpdateResult:
        before = 0.0 if self._one_pass else self._weight_norm()
        self.optimizer.zero_grad(set_to_none=True)  # an update that raised half-way leaves its gradient behind
        cuts = ([each.sequences for each in cut] for part in own for cut in self._micro_batches(part))
        total = sum(tokens_fed(cut, share_prompt=self.model.share_prompt) for cut in cuts)
        result = UpdateResult()
        state = _Accumulator(
            result,
            None if whole is None else whole.report,
            total,
            torch.zeros((), dtype=torch.float64, device=self.model.device),
        )
        norms = []
        for number, run in enumerate(own):
            already = len(state.metrics)
            first = self._accumulate(share, number, run, state, whole)
            if number == 0:
                self._look_at_first(share.objective, first, state, whole)
            norms.append(norm := self._step())
            if not self._skips(norm):
                before = self._check_weights(before)
            result.updates += 1
            if share.judged and not self.ranks.broadcast(_goes_on(whole, number, state.metrics[already:])):
                break
        self.updates += max(0, share.planned - result.updates)  # on every rank: the schedule reads it
        result.tokens = int(self.ranks.sum(torch.tensor(result.tokens)))
        result.metrics = {key: value.value for key, value in on_host(merge_metrics(state.metrics)).items()} | {
            "loss": float(self.ranks.sum(state.loss)) / max(1, result.updates),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        if skipped := sum(map(self._skips, norms)):
            result.metrics["updates/skipped"] = float(skipped)
        return result

    def _look_at_first(
        self, objective: Objective[Any], first: FirstForward, state: _Accumulator, whole: WholeUpdate | None
    ) -> None:
        """Measure and observe before the first optimizer step; rank 0 may refuse the step."""
        problem: Exception | None = None
        if whole is not None:
            try:
                if first:
                    state.metrics.append(objective.measure_first(first, self.model.device))
                if whole.before_first is not None:
                    whole.before_first(first)
            except Exception as error:  # the other ranks have to know before they step
                problem = error
        self.ranks.agree(problem)

    def _accumulate(
        self, share: UpdateShare, number: int, run: Sequence[Occurrence], state: _Accumulator, whole: WholeUpdate | None
    ) -> list[tuple[Trajectory, TokenStatistics]]:
        """Accumulate the gradient of one update: forward and backward passes over the micro-batches of `run`, this
        rank's items. Returns, on rank 0, the statistics of all trajectories."""
        objective, already = share.objective, len(state.metrics)
        statistics, row = None, dict[Occurrence, int]()
        if objective.has_batch_statistics and self.ranks.most(len(run)):
            statistics, row = self._batch_statistics(share, run)
            if whole is not None:
                state.metrics.append(statistics.metrics)
        denominators = [
            torch.where(d == 0, torch.ones_like(d), d).to(self.model.device)
            for d in self.ranks.broadcast(whole and objective.denominators(whole.updates[number], statistics)) or ()
        ]
        measured = Measured()
        problem: Exception | None = None  # of a loss; the passes continue until all ranks know of it
        cuts = self._micro_batches(run)
        passes = self.ranks.most(len(cuts))
        for index in range(passes):
            self.ranks.at(f"update {self.updates + 1}, micro-batch {index + 1} of {passes}")
            self.model.sync_gradients(index == passes - 1)
            if index >= len(cuts):
                self.model.idle_pass(objective.outputs, backward=True)
                continue
            cut = cuts[index]
            trajectories = [trajectory for occurrence in cut for trajectory in occurrence.sequences]
            batch = self.model.pack(trajectories)
            outputs = self.model(batch, objective.outputs)
            part = None if statistics is None else statistics.take([row[occurrence] for occurrence in cut])
            losses: Sequence[Loss] = ()
            if problem is None:
                try:
                    losses = objective.losses(batch, outputs, part)
                except Exception as error:
                    if self.ranks.size == 1:
                        raise
                    problem = error
            if problem is not None:  # its own tokens still need their passes: other ranks may compute parts of them
                outputs.no_gradient().backward()
                continue
            value = reduce(torch.add, [loss.numerator / d for loss, d in zip(losses, denominators, strict=True)])
            value.backward()
            state.loss += value.detach()
            state.metrics.extend(loss.metrics for loss in losses)
            measured.add(trajectories, batch, objective.token_statistics(batch, outputs, losses))
            state.result.tokens += len(batch.tokens)
            if state.report:
                state.report(state.result.tokens, state.total_tokens)
        try:
            statistics_of = by_occurrence(run, cuts, measured.on_host())
        except ValueError as error:  # invalid values of a token
            problem = problem or error
        self.ranks.agree(problem)
        if self.ranks.size > 1:
            state.metrics[already:] = self.ranks.gather_shares(merge_metrics(state.metrics[already:]))
        everywhere = self.ranks.gather_shares(statistics_of)
        first = [] if whole is None else in_order(whole.run[number], whole.parts[number], everywhere)
        for trajectory, values in first:
            state.result.token_statistics.setdefault(trajectory.key, values)
        return first

    @torch.no_grad()
    def _batch_statistics(
        self, share: UpdateShare, run: Sequence[Occurrence]
    ) -> tuple[BatchStatistics, dict[Occurrence, int]]:
        """The objective's statistics of all items of an update, on every rank, and the row of each item of this rank in
        the packs that they were computed from."""
        objective = share.objective
        sequences = [objective.statistics_sequences(occurrence.item) for occurrence in run]
        cuts, parts = self._cuts(sequences), []
        idle = self.ranks.most(len(cuts)) - len(cuts)
        for cut in cuts:
            batch = self.model.pack([trajectory for i in cut for trajectory in sequences[i]])
            parts.append((batch, self.model(batch, objective.statistics_outputs)))
        for _ in range(idle):
            self.model.idle_pass(objective.statistics_outputs, backward=False)
        everywhere = self.ranks.gather_shares((len(run), parts), everywhere=True)
        if self.ranks.size > 1:
            parts = [moved(pair, self.model.device) for _, part in everywhere for pair in part]
        start = sum(count for count, _ in everywhere[: self.ranks.share])
        rows = {run[i]: row for row, i in enumerate(chain.from_iterable(cuts), start)}
        return objective.batch_statistics(parts), rows

    def _split(self, sequences: Sequence[Sequence[Trajectory]]) -> list[list[int]]:
        return split(sequences, self.ranks.shares, share_prompt=self.model.share_prompt)

    def _micro_batches(self, run: Sequence[Occurrence]) -> list[list[Occurrence]]:
        cuts = self._cuts([occurrence.sequences for occurrence in run])
        return [[run[i] for i in cut] for cut in cuts]

    def _cuts(self, sequences: Sequence[Sequence[Trajectory]]) -> list[list[int]]:
        return micro_batches(sequences, self.tokens_per_micro_batch, share_prompt=self.model.share_prompt)

    def _step(self) -> float:
        """Clip, schedule and step; returns the norm of the gradient.

        An update without a backward pass has a gradient of zero, as one over advantages of exactly 0: so skipping those
        does not change a bit of any update.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        one_pass = self._one_pass
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = self.ranks.norm(grads) if one_pass is None else one_pass.gradient_norm()
        if not math.isfinite(value := float(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise SharedProblem(f"the gradient norm of update {self.updates + 1} is {value}")
        factor = self.schedule.factor(self.updates)
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * factor
        if self._skips(value):
            pass
        elif one_pass is not None:
            one_pass.step(self.max_grad_norm, norm)
        else:
            if self.max_grad_norm > 0:
                self.ranks.clip(self.parameters, self.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return value

    def _skips(self, norm: float) -> bool:
        """Return True if an update with a gradient of this norm leaves the weights as they are."""
        return self.on_zero_gradient == "skip" and norm == 0

    def _weight_norm(self) -> float:
        """The norm of all trained weights; reads each of them once."""
        return float(self.ranks.norm([p.detach() for p in self.parameters]))

    def _check_weights(self, before: float) -> float:
        """Check and return the norm of the weights, which was `before` prior to the last update."""
        before, norm = self._one_pass.weight_norms if self._one_pass else (before, self._weight_norm())
        if not math.isfinite(norm):
            raise SharedProblem(f"the weights are NaN, infinite or too large to add up after update {self.updates}")
        if norm > EXPLODED * before > 0:
            grown = f"from {before:.3g} to {norm:.3g}"
            raise SharedProblem(f"the norm of the weights rose {grown} in update {self.updates}")
        return norm

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's tensors by name (`exp_avg/<parameter>` …) and the update count, as `load` takes them. The
        weights are not among them. On several ranks the tensors are sharded, and each rank checks its own slices.

        Raises:
            NotFiniteError: a tensor is not finite: its weights would never change again.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {
            f"{key}/{names[id(parameter)]}": value if isinstance(value, Tensor) else torch.tensor(value)
            for parameter, slots in self.optimizer.state.items()
            for key, value in slots.items()
        }
        for name, value in tensors.items():
            own: Any = value
            if not bool((own.to_local() if hasattr(own, "to_local") else own).sum().isfinite()):
                raise NotFiniteError(f"the optimizer state {name!r} is NaN, infinite or too large to add up")
        return tensors, {"updates": self.updates}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            UserError: the tensors belong to another model, or some are missing.
        """
        from proxima.train.optimizer_state import restore_state

        restore_state(self.optimizer, dict(self.model.named_parameters()), tensors)
        self.updates = int(facts["updates"])


def _packing_order(items: Sequence[Sequence[Trajectory]]) -> Sequence[int]:
    """The order in which items are packed: unchanged, except for paths of episodes, which are ordered so that
    neighbours share most."""
    if all(sequence.sampled is None for sequence, *_ in items):
        return range(len(items))
    from proxima.data.shared_paths import sharing_order

    return sharing_order([sequence for sequence, *_ in items])


def _built(spec: OptimizerSpec, model: PackedModel) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    build_named: Any = getattr(spec, "build_named", None)
    made = spec.build([p for _, p in trained]) if build_named is None else build_named(trained)
    return cast(torch.optim.Optimizer, made)


def _one_pass(optimizer: torch.optim.Optimizer, model: PackedModel, ranks: Ranks) -> "OnePassAdamW | None":
    """The replacement for the optimizer's step: in bf16 on a CPU, where runs need not match torch to the last bit."""
    elsewhere = ranks.size > 1 or model.compute_dtype != torch.bfloat16 or model.device.type != "cpu"
    if elsewhere or sum(p.numel() for _, p in model.named_parameters() if p.requires_grad) < LEAST_COMPILED:
        return None
    from proxima.train.one_pass_adamw import one_pass

    return one_pass(optimizer)


def _goes_on(whole: WholeUpdate | None, number: int, metrics: Sequence[Metrics]) -> bool:
    """Return True if another update follows; rank 0's answer counts."""
    if whole is None or whole.should_continue is None:
        return True
    return whole.should_continue(whole.updates[number], merge_metrics([*metrics]))


def _with_columns(item: Trajectory, columns: dict[str, Any]) -> Trajectory:
    """The trajectory with columns [T, …]; an additional value, that of a sentinel, becomes its bootstrap."""
    value, count = columns.get("value", ()), len(item.tokens)
    if len(value) > count:
        columns |= {"value": value[:count], "bootstrap": float(value[count])}
    return replace(item, **columns)
