"""The training stack: from items and an objective to new weights. It knows no RL."""

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from proxima.core.metrics import Metrics, merge_metrics, on_host
from proxima.data import NotFiniteError
from proxima.data.columns import Floats
from proxima.data.flow import Key
from proxima.data.trajectory import Trajectory
from proxima.model.architecture import vision_parameters
from proxima.model.packed_model import PackedModel
from proxima.model.parallel.gather import gather_into, plain_copy
from proxima.model.parallel.layer_lender import LayerLender
from proxima.model.parallel.sharding import is_sharded, own_slice
from proxima.model.pretrained import LoadedModel
from proxima.system.device_memory import PeakMemory, take_peak_memory
from proxima.training.forward_stage import ForwardStage, LogProbStage, stage_columns, stage_shares
from proxima.training.objectives.protocol import FirstForward, Objective, TokenStatistics
from proxima.training.optimizer import AdamW, OnePassAdamW, Schedule, one_pass, restore_state
from proxima.training.ranks import ALONE, Fill, Gather, Lend, Message, Ranks, Release, SharedProblem, Stages, Update
from proxima.training.shared_update import DealtUpdate, SharedUpdate, UpdateShare

POLICY = "policy"  # the name of a run's first stack
LEAST_COMPILED = 1 << 20  # number of trained weights from which a compiled step pays off
EXPLODED = 3.0  # growth of the norm of all trained weights in one update that has destroyed the model


class OptimizerSpec(Protocol):
    """The config of an optimizer, a kind of `OPTIMIZERS`."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@runtime_checkable
class NamedOptimizerSpec(Protocol):
    """The config of an optimizer that distinguishes parameters by their names in the model."""

    def build_named(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer: ...


@dataclass(kw_only=True)
class UpdateResult:
    """The result of a call of `TrainStack.update`.

    Args:
        metrics: merged over micro-batches and updates, ready to be logged.
        token_statistics: by key of the trajectory, from its first forward pass; skipped items have none.
        tokens: number of tokens fed to forward passes with a backward pass.
        updates: number of optimizer steps made.
        skipped: number of items, over all updates, for which `Objective.skippable` saved the forward pass.
        flops: FLOP of the model in forward and backward passes, of all ranks; see `PassFlops`.
        seconds: of the call, on this rank.
        memory: the peak since the policy's last update, of the rank with most; None where torch does not count it.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    token_statistics: dict[Key, TokenStatistics] = field(default_factory=dict)
    tokens: int = 0
    updates: int = 0
    skipped: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    memory: PeakMemory | None = None


class TrainStack:
    """Optimizer, learning-rate schedule, gradient clipping and micro-batches around a model.

    Args:
        model: the model to train; a `Policy` or a `ScalarModel`.
        optimizer: spec with `build`.
        schedule: of the learning rate, over the updates of the whole run.
        max_grad_norm: bound on the global gradient norm; 0 turns clipping off.
        on_zero_gradient: what to do if the gradient of an update is exactly 0, for instance because all advantages are:
            `skip` leaves weights and optimizer unchanged; `step` lets momentum and weight decay move the weights, as
            TRL and verl do. The schedule counts the update in both cases.
        tokens_per_micro_batch: token budget of one forward pass.
        ranks: the processes that share each update. Rank 0 announces each collective call to the others, which call the
            same method of their stack with this name.
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
        self.model = model
        self.ranks = ranks
        self.name = name
        self.parameters = [p for _, p in model.named_parameters() if p.requires_grad]
        self.optimizer = _built(optimizer or AdamW(), model)
        self.peak = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.schedule = schedule or Schedule()
        self.max_grad_norm = max_grad_norm
        self.on_zero_gradient = on_zero_gradient
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.updates = 0
        self.changes = 0  # how often an update has begun to change the weights
        self._one_pass: OnePassAdamW | None = None
        if ranks is ALONE:
            self._one_pass = _one_pass(self.optimizer, model)
        self._plain: LoadedModel | None = None  # on rank 0, of a sharded model
        self._gathers = False
        self._lender: LayerLender | None = None  # on rank 0, of a sharded model

    def log_prob(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """[T] float32 log-probs of each response, nats, at the trajectory's temperature, under the current weights; the
        model is a `Policy`."""
        return self.columns(LogProbStage("proximal_log_prob", self.model), trajectories)["proximal_log_prob"]

    def fill(self, stages: Iterable[ForwardStage], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the columns of the stages, run in order. A stage whose column all trajectories have is
        not run."""
        out = list(trajectories)
        for stage in stages:
            if all(getattr(item, stage.column) is not None for item in out):
                continue
            filled = self.columns(stage, out)
            for i, item in enumerate(out):
                out[i] = _with_columns(item, {name: column[i] for name, column in filled.items()})
        return out

    def columns(self, stage: ForwardStage, trajectories: Sequence[Trajectory] | None) -> dict[str, list[Floats]]:
        """The columns that a stage fills, [T, …] for each trajectory, see `stage_columns`. `trajectories` are None on
        the other ranks, each of which receives its share. Collective."""
        ranks = ALONE if stage.on_rank_zero else self.ranks
        shares = None
        if trajectories is not None:
            shares = stage_shares(
                trajectories,
                ranks.shares,
                self.tokens_per_micro_batch,
                share_prompt=self.model.share_prompt,
                pair_cost=self.model.pair_cost,
            )
        with ranks.call(Fill(self.name, stage.column)):
            return stage_columns(stage, shares, ranks)

    def late_stages(self, make: Callable[[], Sequence[ForwardStage]]) -> Sequence[ForwardStage]:
        """Create stages in the middle of a run, on every rank at once: loading their models is collective."""
        with self._call(Stages):
            return make()

    def gathered(self, device: torch.device | str = "cpu") -> LoadedModel:
        """The whole trained model with its current weights, for engines: the model itself, or of a sharded one
        a copy on rank 0, while the others get their own part. The first call creates the copy, on `device`.
        Collective."""
        if not is_sharded(self.model.model):
            return self.model.loaded

        with self._call(Gather):
            if self._gathers:
                target = None if self._plain is None else self._plain.model
                gather_into(self.model.model, target)
            else:
                self._plain = plain_copy(self.model.loaded, device)
                self._gathers = True
        return self._plain or self.model.loaded

    def lent_model(self) -> LoadedModel:
        """The trained model for an engine that reads it only within `lent(model)`: the model itself, or on rank 0
        of a sharded one a model whose current weights are gathered layer by layer."""
        if not is_sharded(self.model.model):
            return self.model.loaded

        if self._lender is None:
            self._lender = LayerLender(self.model, self.ranks, partial(self._call, Lend))
        return replace(self.model.loaded, model=self._lender.module, sharding=None, device=None)

    def follow_lender(self) -> None:
        """On the other ranks: help to gather the weights while rank 0 lends the model."""
        LayerLender(self.model, self.ranks, nullcontext).follow()

    def release(self) -> None:
        """Free cached device memory on every rank, for other processes on the device; no effect on a rank that has not
        used a GPU. Collective."""
        with self._call(Release):
            torch.cuda.empty_cache()

    def update(
        self,
        objective: Objective[Any],
        updates: Sequence[Sequence[Any]] | None,
        progress: Callable[[int, int], None] | None = None,
        planned: int = 0,
        should_continue: Callable[[Sequence[Any], Metrics], bool] | None = None,
        before_first: Callable[[FirstForward], None] | None = None,
    ) -> UpdateResult:
        """Make one optimizer step for each of the `updates`, in order. Collective: every rank computes its share.

        Args:
            objective: the loss to minimise.
            updates: the items of each update, as the objective reads them; an item may occur in several (epochs). None
                on the other ranks, each of which receives those of its share.
            progress: called with (tokens done, tokens in total) after each micro-batch.
            planned: the least number of updates that the schedule counts for this call, so that a batch that was not
                full advances it like a full one.
            should_continue: called on rank 0 after each update with its items and its metrics; False skips the
                remaining updates. The other ranks are told.
            before_first: called on rank 0 with the statistics of the first forward passes before their optimizer step,
                which is not made if the call raises. An update that skips all items and leaves the weights unchanged
                passes no statistics, and the next one is still a first.

        Raises:
            ValueError: the loss lacks a tensor.
            NotFiniteError: a gradient norm is not finite, and the update was not made; or after an update the weights
                are not finite, or their norm has grown by more than a factor of `EXPLODED`.
        """
        began = time.perf_counter()
        dealt = None
        if updates is not None:
            dealt = [self._dealt(objective, items) for items in updates]
        with self._call(Update, objective, planned, should_continue is not None):
            shared = self._shared(objective, dealt)
            before = 0.0 if self._one_pass else self._weight_norm()
            self.optimizer.zero_grad(set_to_none=True)  # an update that raised half-way leaves its gradient behind
            result = UpdateResult()
            metrics: list[Metrics] = []
            norms: list[float] = []
            loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
            tokens = 0
            to_feed = sum(update.tokens for update in shared)

            def fed(count: int) -> None:
                nonlocal tokens
                tokens += count
                if progress is not None:
                    progress(tokens, to_feed)

            at_start = True  # no forward pass yet, and no step
            moved = 0  # updates that moved the weights
            for update in shared:
                first, measured = update.accumulate(f"update {self.updates + 1}", loss, fed)
                for trajectory, values in first:
                    if trajectory.key not in result.token_statistics:
                        result.token_statistics[trajectory.key] = replace(values, updates_before=moved)
                if at_start:
                    measured.append(update.measure_first(first, before_first))
                metrics += measured
                self.changes += 1
                norm = self._step()
                norms.append(norm)
                result.skipped += update.skipped
                result.flops += update.flops
                if at_start:  # the same on every rank, so that all of them ask
                    passed = self.ranks.maximum(len(first)) > 0
                    at_start = not passed and self._skips(norm)
                if not self._skips(norm):
                    before = self._check_weights(before)
                    moved += 1
                if should_continue is not None:
                    goes_on = should_continue(update.items, merge_metrics(measured))
                    if not self.ranks.share_value(goes_on):
                        break
            result.updates = len(norms)
            self.updates += max(0, planned - result.updates)  # the schedule reads it
            result.metrics = self._metrics(metrics, float(self.ranks.sum(loss)), norms)
            tokens_and_flops = torch.tensor([tokens, result.flops], dtype=torch.float64)
            fed_tokens, result.flops = self.ranks.sum(tokens_and_flops).tolist()
            result.tokens = int(fed_tokens)
            if self.name == POLICY:
                result.memory = self._peak_memory()
            result.seconds = time.perf_counter() - began
            return result

    def _dealt(self, objective: Objective[Any], items: Sequence[Any]) -> DealtUpdate:
        """An update, dealt to the ranks' shares."""
        return DealtUpdate(objective, items, self.model, self.ranks.shares, self.tokens_per_micro_batch)

    def _shared(self, objective: Objective[Any], dealt: Sequence[DealtUpdate] | None) -> list[SharedUpdate]:
        """The updates with this rank's shares; `dealt` on rank 0. Collective."""
        make: Callable[[int], list[UpdateShare]] | None = None
        if dealt is not None:
            make = partial(_of_share, dealt)
        own = self.ranks.scatter(make)
        wholes: Sequence[DealtUpdate | None] = dealt or [None] * len(own)
        budget = self.tokens_per_micro_batch
        shared: list[SharedUpdate] = []
        for share, whole in zip(own, wholes, strict=True):
            shared.append(SharedUpdate(objective, share, self.model, self.ranks, budget, whole))
        return shared

    def _peak_memory(self) -> PeakMemory | None:
        """The peak of the rank with most since the last call. Collective where there is a peak."""
        peak = take_peak_memory(self.model.device)
        if peak is None:
            return None
        return PeakMemory(*map(self.ranks.maximum, peak))

    def _call(self, message: Callable[..., Message], *facts: Any) -> AbstractContextManager[None]:
        """On rank 0: send every rank a message about this stack, see `Ranks.call`."""
        return self.ranks.call(message(self.name, *facts))

    def _metrics(self, measured: list[Metrics], loss: float, norms: Sequence[float]) -> dict[str, float]:
        """The metrics of a call of `update`, ready to be logged; `loss` is the sum over its updates."""
        merged = on_host(merge_metrics(measured))
        metrics = {name: metric.value for name, metric in merged.items()}
        metrics["loss"] = loss / max(1, len(norms))
        metrics["grad_norm"] = sum(norms) / max(1, len(norms))
        metrics["lr"] = float(self.optimizer.param_groups[0]["lr"])
        skipped = sum(map(self._skips, norms))
        if skipped:
            metrics["updates/skipped"] = float(skipped)
        return metrics

    def _step(self) -> float:
        """Clip, schedule and step; returns the norm of the gradient before clipping.

        An update without a backward pass has a gradient of zero, like one over advantages of exactly 0, so skipping
        those items does not change an update by a bit.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._one_pass is None:
            norm = self.ranks.norm([p.grad for p in self.parameters if p.grad is not None])
        else:
            norm = self._one_pass.gradient_norm()
        value = float(norm)
        if not math.isfinite(value):
            self.optimizer.zero_grad(set_to_none=True)
            raise SharedProblem(f"the gradient norm of update {self.updates + 1} is {value}")
        factor = self.schedule.factor(self.updates)
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * factor
        if not self._skips(value):
            self._move(norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return value

    def _move(self, norm: Tensor) -> None:
        """Move the weights along the gradient, of norm `norm`, clipped."""
        if self._one_pass is not None:
            self._one_pass.step(self.max_grad_norm, norm)
            return
        if self.max_grad_norm > 0:
            self.ranks.clip(self.parameters, self.max_grad_norm, norm)
        self.optimizer.step()

    def _skips(self, norm: float) -> bool:
        """Return True if an update with a gradient of this norm leaves the weights as they are."""
        return self.on_zero_gradient == "skip" and norm == 0

    def _weight_norm(self) -> float:
        """The norm of all trained weights; reads each of them once."""
        return float(self.ranks.norm([p.detach() for p in self.parameters]))

    def _check_weights(self, before: float) -> float:
        """Check and return the norm of the weights; `before` is the norm prior to the last update."""
        if self._one_pass is None:
            norm = self._weight_norm()
        else:
            before, norm = self._one_pass.weight_norms
        if not math.isfinite(norm):
            raise SharedProblem(f"the weights are NaN, infinite or too large to add up after update {self.updates}")
        if norm > EXPLODED * before > 0:
            grown = f"from {before:.3g} to {norm:.3g}"
            raise SharedProblem(f"the norm of the weights rose {grown} in update {self.updates}")
        return norm

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's tensors by name (`exp_avg/<parameter>` …), without the weights, and the update count, as
        `load` takes them. On several ranks the tensors are sharded, and each rank checks its own slices.

        Raises:
            NotFiniteError: a tensor is not finite; its weights could not recover.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors: dict[str, Tensor] = {}
        for parameter, slots in self.optimizer.state.items():
            for key, value in slots.items():
                if not isinstance(value, Tensor):
                    value = torch.tensor(value)
                tensors[f"{key}/{names[id(parameter)]}"] = value
        for name, tensor in tensors.items():
            if not bool(own_slice(tensor).sum().isfinite()):
                raise NotFiniteError(f"the optimizer state {name!r} is NaN, infinite or too large to add up")
        return tensors, {"updates": self.updates}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            UserError: the tensors belong to another model, or some are missing.
        """
        restore_state(self.optimizer, dict(self.model.named_parameters()), tensors)
        self.updates = int(facts["updates"])


def _of_share(dealt: Sequence[DealtUpdate], share: int) -> list[UpdateShare]:
    """What a share receives of each update."""
    return [update.shares[share] for update in dealt]


def _built(spec: OptimizerSpec, model: PackedModel) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if isinstance(spec, NamedOptimizerSpec):
        made = spec.build_named(trained)
    else:
        made = spec.build([p for _, p in trained])
    if model.loaded.vision_lr_ratio:
        scaled = {id(parameter) for parameter in vision_parameters(model.model).values()}
        made.param_groups = list(_split(made.param_groups, scaled, model.loaded.vision_lr_ratio))
    return made


def _split(groups: Iterable[dict[str, Any]], scaled: Container[int], ratio: float) -> Iterator[dict[str, Any]]:
    """The groups, with parameters whose ids are in `scaled` split off into groups at `ratio` times the learning
    rate."""
    for group in groups:
        apart = [p for p in group["params"] if id(p) in scaled]
        rest = [p for p in group["params"] if id(p) not in scaled]
        for params, factor in ((rest, 1.0), (apart, ratio)):
            if params:
                yield {**group, "params": params, "lr": group["lr"] * factor}


def _one_pass(optimizer: torch.optim.Optimizer, model: PackedModel) -> OnePassAdamW | None:
    """A faster replacement for the optimizer's step, in bf16 on a CPU, where runs need not match torch to the last bit;
    None elsewhere and for small models."""
    if model.compute_dtype != torch.bfloat16 or model.device.type != "cpu":
        return None
    weights = sum(p.numel() for _, p in model.named_parameters() if p.requires_grad)
    if weights < LEAST_COMPILED:
        return None

    return one_pass(optimizer)


def _with_columns(item: Trajectory, columns: dict[str, Any]) -> Trajectory:
    """The trajectory with columns [T, …]; the additional value of a sentinel becomes its bootstrap."""
    value = columns.get("value", ())
    count = len(item.tokens)
    if len(value) > count:
        columns |= {"value": value[:count], "bootstrap": float(value[count])}
    return replace(item, **columns)
