"""The gradient of an update: forward and backward passes over this rank's share of its items.

Rank 0 deals the items, and each rank receives those of its share. Reductions make the ranks agree on problems; metrics
and statistics are gathered on rank 0, which computes what depends on the whole update. A single process is rank 0.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics
from proxima.data.packed_batch import PackedBatch, packing_order
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import to_device
from proxima.model.micro_batch import micro_batches
from proxima.model.packed_model import PackedModel, TokenOutputs
from proxima.model.pass_flops import pass_flops
from proxima.system.out_of_memory import memory_of
from proxima.training.dealing import cuts_of_shares, pass_sizes
from proxima.training.objectives.protocol import FirstForward, Measured, Objective, TokenStatistics
from proxima.training.ranks import Ranks


@dataclass(frozen=True)
class UpdateShare:
    """What a rank receives of an update.

    Args:
        cuts: its micro-batches, as indices of the items that are run.
        items: those of its micro-batches, by index.
        denominators: see `Objective.denominators`; None: they depend on the statistics of the batch.
    """

    cuts: Sequence[Sequence[int]]
    items: Mapping[int, Any]
    denominators: Sequence[Tensor] | None


class DealtUpdate:
    """An update with all its items, on rank 0.

    Args:
        objective: the loss to minimise.
        items: of the update, as the objective reads them.
        shares: how many there are.
        budget: tokens of one micro-batch.

    sequences: of each item that is run, in the order in which the items are packed.
    skipped: the number of items for which `Objective.skippable` saves the forward pass.
    shares: what each share receives.
    """

    def __init__(
        self, objective: Objective[Any], items: Sequence[Any], model: PackedModel, shares: int, budget: int
    ) -> None:
        self.items = items
        pairs = [(item, objective.sequences(item)) for item in items]
        active = [(item, sequences) for item, sequences in pairs if any(len(each.tokens) for each in sequences)]
        run = [(item, sequences) for item, sequences in active if not objective.skippable(item)]
        run = [run[i] for i in packing_order([sequences for _, sequences in run])]
        self.sequences = [sequences for _, sequences in run]
        self.skipped = len(active) - len(run)
        denominators = None
        if not (objective.has_batch_statistics and run):
            denominators = objective.denominators(items)
        dealt = cuts_of_shares(
            self.sequences, shares, budget, pair_cost=model.pair_cost, share_prompt=model.share_prompt
        )
        self.shares = []
        for cuts in dealt:
            own = {i: run[i][0] for cut in cuts for i in cut}
            self.shares.append(UpdateShare(cuts, own, denominators))


@dataclass(frozen=True)
class StatisticsShare:
    """What a rank receives of the statistics of a batch.

    Args:
        of_cuts: those of each of its micro-batches, see `BatchStatistics.take`.
        denominators: see `Objective.denominators`.
        metrics: on rank 0, so that they are counted once.
    """

    of_cuts: Sequence[Any]
    denominators: Sequence[Tensor]
    metrics: Metrics


class SharedUpdate:
    """An update, and this rank's share of it.

    Args:
        objective: the loss to minimise.
        share: of this rank.
        budget: tokens of one micro-batch.
        whole: on rank 0, with all items.

    sequences: of each item of the share, by index.
    cuts: this rank's micro-batches, as indices of the items that are run; they feed `tokens` to the model, whose
        forward and backward passes are `flops`, see `PassFlops`.
    own: the items of these, in their order.
    """

    def __init__(
        self,
        objective: Objective[Any],
        share: UpdateShare,
        model: PackedModel,
        ranks: Ranks,
        budget: int,
        whole: DealtUpdate | None,
    ) -> None:
        self.objective = objective
        self.share = share
        self.model = model
        self.ranks = ranks
        self.budget = budget
        self.whole = whole
        self.cuts = share.cuts
        self.own = list(chain.from_iterable(self.cuts))
        if whole is None:
            self.sequences = {i: objective.sequences(item) for i, item in share.items.items()}
        else:
            self.sequences = {i: whole.sequences[i] for i in share.items}
        self.tokens = 0
        self.flops = 0.0
        flops = pass_flops(model.model.config)
        trained = 0.0 if model.loaded.adapter_parameters else 1.0
        for cut in self.cuts:
            fed, predicted, attended = pass_sizes([self.sequences[i] for i in cut], share_prompt=model.share_prompt)
            self.tokens += fed
            self.flops += flops.of(fed, predicted, attended, trained=trained)

    @property
    def items(self) -> Sequence[Any]:
        """All items of the update, on rank 0."""
        return () if self.whole is None else self.whole.items

    @property
    def skipped(self) -> int:
        """The number of items, on rank 0, for which `Objective.skippable` saves the forward pass."""
        return 0 if self.whole is None else self.whole.skipped

    def accumulate(self, name: str, total: Tensor, fed: Callable[[int], None]) -> tuple[FirstForward, list[Metrics]]:
        """Accumulate the gradient. Collective.

        Args:
            name: of the update, for status reports.
            total: [] float64, to which the loss of this rank is added.
            fed: called with the number of tokens of each micro-batch that is done.

        Returns: on rank 0 the statistics of all trajectories, and the metrics of all ranks.
        """
        objective = self.objective
        statistics = None
        known = self.share.denominators
        if known is None:
            statistics = self._batch_statistics()
            known = statistics.denominators
        not_zero = [torch.where(d == 0, torch.ones_like(d), d) for d in known]
        denominators = [to_device(d, self.model.device) for d in not_zero]
        measured = Measured()
        metrics = list[Metrics]()
        problem: Exception | None = None  # of a loss; the passes continue until all ranks know of it
        passes = self.ranks.maximum(len(self.cuts))
        for index in range(passes):
            part = f"{name}, micro-batch {index + 1} of {passes}"
            self.ranks.at(part)
            self.model.sync_gradients(index == passes - 1)
            if index >= len(self.cuts):
                self.model.idle_pass(objective.outputs, backward=True)
                continue
            trajectories = [trajectory for i in self.cuts[index] for trajectory in self.sequences[i]]
            batch = self.model.pack(trajectories)
            work = f"{part}, {len(batch.tokens):,} tokens"
            with memory_of(work):
                outputs = self.model(batch, objective.outputs)
            of_cut = None if statistics is None else statistics.of_cuts[index]
            losses: Sequence[Loss] = ()
            if problem is None:
                try:
                    with memory_of(work):
                        losses = objective.losses(batch, outputs, of_cut)
                except Exception as error:
                    if self.ranks.size == 1:
                        raise
                    problem = error
            if problem is not None:  # its own tokens still need their passes: other ranks may compute parts of them
                outputs.no_gradient().backward()
                continue
            value = reduce(torch.add, [loss.numerator / d for loss, d in zip(losses, denominators, strict=True)])
            with memory_of(work):
                value.backward()
            total += value.detach()
            metrics.extend(loss.metrics for loss in losses)
            measured.add(trajectories, batch, objective.token_statistics(batch, outputs, losses))
            fed(len(batch.tokens))
        by_item: dict[int, list[TokenStatistics]] = {}  # of this rank's items; empty if the objective gives none
        try:
            rest = iter(measured.on_host())
            by_item = {i: list(islice(rest, len(self.sequences[i]))) for cut in self.cuts for i in cut}
        except ValueError as error:  # invalid values of a token
            problem = problem or error
        self.ranks.agree(problem)
        gathered = ChainMap(*self.ranks.gather_shares(by_item))
        sequences = self.sequences if self.whole is None else self.whole.sequences
        first: list[tuple[Trajectory, TokenStatistics]] = []
        for i in sorted(gathered):
            first += zip(sequences[i], gathered[i], strict=False)
        of_all_ranks = self.ranks.gather_metrics(metrics)
        if statistics is not None:
            of_all_ranks = [statistics.metrics, *of_all_ranks]
        return first, of_all_ranks

    def measure_first(self, first: FirstForward, observe: Callable[[FirstForward], None] | None) -> Metrics:
        """On rank 0, measure and observe before the first optimizer step; `observe` may raise, which refuses the step
        on every rank. Collective."""
        problem: Exception | None = None
        metrics: Metrics = {}
        try:
            if first and self.whole is not None:
                metrics = self.objective.measure_first(first, self.model.device)
            if observe is not None:
                observe(first)
        except Exception as error:  # the other ranks have to know before they step
            problem = error
        self.ranks.agree(problem)
        return metrics

    @torch.no_grad()
    def _batch_statistics(self) -> StatisticsShare:
        """This rank's share of the objective's statistics of all items, which rank 0 computes. Collective."""
        objective = self.objective
        sequences: dict[int, Sequence[Trajectory]] = {}
        problem: Exception | None = None
        try:
            sequences = {i: objective.statistics_sequences(item) for i, item in self.share.items.items()}
        except Exception as error:  # the other ranks have items for which it does not fail
            problem = error
        self.ranks.agree(problem)
        cuts = self._cuts(sequences)
        idle = self.ranks.maximum(len(cuts)) - len(cuts)
        parts: list[tuple[PackedBatch, TokenOutputs]] = []
        for cut in cuts:
            batch = self.model.pack([trajectory for i in cut for trajectory in sequences[i]])
            parts.append((batch, self.model(batch, objective.statistics_outputs)))
        for _ in range(idle):
            self.model.idle_pass(objective.statistics_outputs, backward=False)
        order = list(chain.from_iterable(cuts))
        gathered = self.ranks.gather_shares((order, parts), device=self.model.device)
        make: Callable[[int], StatisticsShare] | None = None
        if self.whole is not None:
            try:
                make = self._make_statistics(self.whole, gathered)
            except Exception as error:  # the other ranks wait for their shares
                problem = error
        self.ranks.agree(problem)
        return self.ranks.scatter(make, device=self.model.device)

    def _make_statistics(
        self, whole: DealtUpdate, gathered: Sequence[tuple[Sequence[int], Sequence[tuple[PackedBatch, TokenOutputs]]]]
    ) -> Callable[[int], StatisticsShare]:
        """Compute the statistics of all items from the indices and the passes of each share; returns what makes the
        part of a share."""
        order: list[int] = []
        parts: list[tuple[PackedBatch, TokenOutputs]] = []
        for items_of_share, parts_of_share in gathered:
            order += items_of_share
            parts += parts_of_share
        statistics = self.objective.batch_statistics(parts)
        denominators = self.objective.denominators(whole.items, statistics)
        row = {i: place for place, i in enumerate(order)}

        shares: list[StatisticsShare] = []
        for number, share in enumerate(whole.shares):
            of_cuts = [statistics.take([row[i] for i in cut]) for cut in share.cuts]
            metrics = statistics.metrics if number == 0 else {}
            shares.append(StatisticsShare(of_cuts, denominators, metrics))
        return shares.__getitem__

    def _cuts(self, sequences: Mapping[int, Sequence[Trajectory]]) -> list[list[int]]:
        """The micro-batches of this rank's items by other sequences of theirs, as indices of all items."""
        cuts = micro_batches([sequences[i] for i in self.own], self.budget, share_prompt=self.model.share_prompt)
        return [[self.own[i] for i in cut] for cut in cuts]
