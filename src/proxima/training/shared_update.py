"""The gradient of an update: forward and backward passes over this rank's share of its items.

Every rank gets the same update and determines its share by the same function. Reductions make the ranks agree on
denominators, statistics, metrics and problems. A single process is the only rank.
"""

from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics
from proxima.data.packed_batch import packing_order
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import to_device
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.model.packed_model import PackedModel
from proxima.system.out_of_memory import memory_of
from proxima.training.dealing import own_cuts
from proxima.training.objectives.protocol import BatchStatistics, FirstForward, Measured, Objective, TokenStatistics
from proxima.training.ranks import Ranks


class SharedUpdate:
    """An update, and this rank's share of it.

    Args:
        objective: the loss to minimise.
        items: of the update, as the objective reads them.
        budget: tokens of one micro-batch.

    run, sequences: the items that are run, in the order in which they are packed, and the sequences of each.
    skipped: the number of items for which `Objective.skippable` saves the forward pass.
    cuts: this rank's micro-batches, as indices of `run`; they feed `tokens` to the model.
    own: the items of these, in their order.
    """

    def __init__(
        self, objective: Objective[Any], items: Sequence[Any], model: PackedModel, ranks: Ranks, budget: int
    ) -> None:
        self.objective, self.items, self.model, self.ranks, self.budget = objective, items, model, ranks, budget
        pairs = [(item, objective.sequences(item)) for item in items]
        active = [(item, sequences) for item, sequences in pairs if any(len(each.tokens) for each in sequences)]
        run = [(item, sequences) for item, sequences in active if not objective.skippable(item)]
        run = [run[i] for i in packing_order([sequences for _, sequences in run])]
        self.run, self.sequences = [item for item, _ in run], [sequences for _, sequences in run]
        self.skipped, shared = len(active) - len(run), model.share_prompt
        dealt = ranks.shares, ranks.share, budget
        self.cuts = own_cuts(self.sequences, *dealt, pair_cost=model.pair_cost, share_prompt=shared)
        self.own = list(chain.from_iterable(self.cuts))
        self.tokens = sum(tokens_fed([self.sequences[i] for i in cut], share_prompt=shared) for cut in self.cuts)

    def accumulate(self, name: str, total: Tensor, fed: Callable[[int], None]) -> tuple[FirstForward, list[Metrics]]:
        """Accumulate the gradient. Collective.

        Args:
            name: of the update, for status reports.
            total: [] float64, to which the loss of this rank is added.
            fed: called with the number of tokens of each micro-batch that is done.

        Returns: the statistics of all trajectories, and the metrics of all ranks.
        """
        objective, statistics, row = self.objective, None, dict[int, int]()
        if objective.has_batch_statistics and self.run:
            statistics, row = self._batch_statistics()
        denominators = [
            to_device(torch.where(d == 0, torch.ones_like(d), d), self.model.device)
            for d in objective.denominators(self.items, statistics)
        ]
        measured, metrics = Measured(), list[Metrics]()
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
            statistics_of_cut = None if statistics is None else statistics.take([row[i] for i in self.cuts[index]])
            losses: Sequence[Loss] = ()
            if problem is None:
                try:
                    with memory_of(work):
                        losses = objective.losses(batch, outputs, statistics_of_cut)
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
        everywhere = ChainMap(*self.ranks.gather_shares(by_item, everywhere=True))
        first = [pair for i in sorted(everywhere) for pair in zip(self.sequences[i], everywhere[i], strict=False)]
        of_statistics = [] if statistics is None else [statistics.metrics]
        return first, [*of_statistics, *self.ranks.gather_metrics(metrics)]

    def measure_first(self, first: FirstForward, observe: Callable[[FirstForward], None] | None) -> Metrics:
        """Measure and observe before the first optimizer step; `observe` may raise, which refuses the step on every
        rank. Collective."""
        problem: Exception | None = None
        metrics: Metrics = {}
        try:
            if first:
                metrics = self.objective.measure_first(first, self.model.device)
            if observe is not None:
                observe(first)
        except Exception as error:  # the other ranks have to know before they step
            problem = error
        self.ranks.agree(problem)
        return metrics

    @torch.no_grad()
    def _batch_statistics(self) -> tuple[BatchStatistics, dict[int, int]]:
        """The objective's statistics of all items, on every rank, and the row of each item of this rank in the packs
        that they were computed from."""
        objective = self.objective
        sequences = [objective.statistics_sequences(item) for item in self.run]
        cuts, parts = self._cuts(sequences), []
        idle = self.ranks.maximum(len(cuts)) - len(cuts)
        for cut in cuts:
            batch = self.model.pack([trajectory for i in cut for trajectory in sequences[i]])
            parts.append((batch, self.model(batch, objective.statistics_outputs)))
        for _ in range(idle):
            self.model.idle_pass(objective.statistics_outputs, backward=False)
        everywhere = self.ranks.gather_shares((len(self.own), parts), everywhere=True, device=self.model.device)
        parts = [pair for _, packs in everywhere for pair in packs]
        start = sum(count for count, _ in everywhere[: self.ranks.share])
        rows = {i: row for row, i in enumerate(chain.from_iterable(cuts), start)}
        return objective.batch_statistics(parts), rows

    def _cuts(self, sequences: Sequence[Sequence[Trajectory]]) -> list[list[int]]:
        """The micro-batches of this rank's items by other sequences of theirs, as indices of all items."""
        cuts = micro_batches([sequences[i] for i in self.own], self.budget, share_prompt=self.model.share_prompt)
        return [[self.own[i] for i in cut] for cut in cuts]
