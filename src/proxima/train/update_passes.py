"""The gradient of an update: forward and backward passes over this rank's share of its items.

Every rank is given the same updates, takes its share of each by the same function, and agrees with the others by
reductions: on denominators, statistics, metrics and problems. A single process is its only rank.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics
from proxima.data import Trajectory
from proxima.data.shared_paths import packing_order
from proxima.model import PackedModel
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.train.objectives.protocol import BatchStatistics, FirstForward, Measured, Objective, TokenStatistics
from proxima.train.ranks import Ranks, moved, split


@dataclass(frozen=True, kw_only=True)
class SharedUpdate:
    """An update; the same on every rank but for `own` and `cuts`.

    Args:
        items: all of them.
        run: those that are run, in the order in which they are packed.
        sequences: of each item of `run`.
        skipped: the number of items for which `Objective.skippable` saves the forward pass.
        own: this rank's items, as indices of `run`, in order.
        cuts: the micro-batches of these.
    """

    items: Sequence[Any]
    run: Sequence[Any]
    sequences: Sequence[Sequence[Trajectory]]
    skipped: int
    own: Sequence[int]
    cuts: Sequence[Sequence[int]]

    def by_item(self, statistics: Sequence[TokenStatistics]) -> dict[int, list[TokenStatistics]]:
        """The statistics of this rank's items by index, from those of all sequences in the order of the cuts; empty
        lists if the objective gives none."""
        rest = iter(statistics)
        return {i: list(islice(rest, len(self.sequences[i]))) for cut in self.cuts for i in cut}

    def in_order(self, by_item: Mapping[int, list[TokenStatistics]]) -> FirstForward:
        """The trajectories with their statistics, in the order of the items."""
        pairs = ((self.sequences[i], by_item[i]) for i in sorted(by_item))
        return [pair for sequences, measured in pairs for pair in zip(sequences, measured, strict=False)]


class UpdatePasses:
    """The passes of the updates of one call of `TrainStack.update`, and their running sums on this rank.

    Args:
        progress: called with (tokens done, tokens in total) after each micro-batch.
    """

    def __init__(
        self,
        objective: Objective[Any],
        model: PackedModel,
        ranks: Ranks,
        tokens_per_micro_batch: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.objective, self.model, self.ranks, self.budget = objective, model, ranks, tokens_per_micro_batch
        self.progress = progress
        self.loss = torch.zeros((), dtype=torch.float64, device=model.device)
        self.tokens = self.to_feed = 0

    def share(self, items: Sequence[Any]) -> SharedUpdate:
        """The items of an update that are run, and this rank's share: the same function on every rank."""
        objective, shares_prompt = self.objective, self.model.share_prompt
        pairs = [(item, objective.sequences(item)) for item in items]
        active = [(item, sequences) for item, sequences in pairs if any(len(each.tokens) for each in sequences)]
        run = [(item, sequences) for item, sequences in active if not objective.skippable(item)]
        run = [run[i] for i in packing_order([sequences for _, sequences in run])]
        sequences = [sequences for _, sequences in run]
        own = split(sequences, self.ranks.shares, share_prompt=shares_prompt)[self.ranks.share]
        cuts = self._cuts(sequences, own)
        self.to_feed += sum(tokens_fed([sequences[i] for i in cut], share_prompt=shares_prompt) for cut in cuts)
        return SharedUpdate(
            items=items,
            run=[item for item, _ in run],
            sequences=sequences,
            skipped=len(active) - len(run),
            own=own,
            cuts=cuts,
        )

    def accumulate(self, update: SharedUpdate, name: str) -> tuple[FirstForward, list[Metrics]]:
        """Accumulate the gradient of an update, which status reports call `name`. Returns the statistics of all
        trajectories, and the metrics of all ranks. Collective."""
        objective, statistics, row = self.objective, None, dict[int, int]()
        if objective.has_batch_statistics and update.run:
            statistics, row = self._batch_statistics(update)
        denominators = [
            torch.where(d == 0, torch.ones_like(d), d).to(self.model.device)
            for d in objective.denominators(update.items, statistics)
        ]
        measured, metrics = Measured(), list[Metrics]()
        problem: Exception | None = None  # of a loss; the passes continue until all ranks know of it
        passes = self.ranks.most(len(update.cuts))
        for index in range(passes):
            self.ranks.at(f"{name}, micro-batch {index + 1} of {passes}")
            self.model.sync_gradients(index == passes - 1)
            if index >= len(update.cuts):
                self.model.idle_pass(objective.outputs, backward=True)
                continue
            trajectories = [trajectory for i in update.cuts[index] for trajectory in update.sequences[i]]
            batch = self.model.pack(trajectories)
            outputs = self.model(batch, objective.outputs)
            part = None if statistics is None else statistics.take([row[i] for i in update.cuts[index]])
            losses: Sequence[Loss] = ()
            if problem is None:
                try:
                    losses = objective.losses(batch, outputs, part)
                except Exception as error:
                    problem = self.ranks.kept(error)
            if problem is not None:  # its own tokens still need their passes: other ranks may compute parts of them
                outputs.no_gradient().backward()
                continue
            value = reduce(torch.add, [loss.numerator / d for loss, d in zip(losses, denominators, strict=True)])
            value.backward()
            self.loss += value.detach()
            metrics.extend(loss.metrics for loss in losses)
            measured.add(trajectories, batch, objective.token_statistics(batch, outputs, losses))
            self._fed(len(batch.tokens))
        try:
            by_item = update.by_item(measured.on_host())
        except ValueError as error:  # invalid values of a token
            problem = problem or error
        self.ranks.agree(problem)
        everywhere = self.ranks.gather_shares(by_item, everywhere=True)
        of_statistics = [] if statistics is None else [statistics.metrics]
        return update.in_order(ChainMap(*everywhere)), [*of_statistics, *self.ranks.gather_metrics(metrics)]

    def look_at_first(self, first: FirstForward, observe: Callable[[FirstForward], None] | None) -> Metrics:
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

    def totals(self) -> tuple[float, int]:
        """The loss, summed over the updates, and the tokens fed, both of all ranks. Collective."""
        return float(self.ranks.sum(self.loss)), int(self.ranks.sum(torch.tensor(self.tokens)))

    def _fed(self, tokens: int) -> None:
        self.tokens += tokens
        if self.progress is not None:
            self.progress(self.tokens, self.to_feed)

    @torch.no_grad()
    def _batch_statistics(self, update: SharedUpdate) -> tuple[BatchStatistics, dict[int, int]]:
        """The objective's statistics of all items of an update, on every rank, and the row of each item of this rank in
        the packs that they were computed from."""
        objective = self.objective
        sequences = [objective.statistics_sequences(item) for item in update.run]
        cuts, parts = self._cuts(sequences, update.own), []
        idle = self.ranks.most(len(cuts)) - len(cuts)
        for cut in cuts:
            batch = self.model.pack([trajectory for i in cut for trajectory in sequences[i]])
            parts.append((batch, self.model(batch, objective.statistics_outputs)))
        for _ in range(idle):
            self.model.idle_pass(objective.statistics_outputs, backward=False)
        everywhere = self.ranks.gather_shares((len(update.own), parts), everywhere=True)
        if self.ranks.size > 1:
            parts = [moved(pair, self.model.device) for _, part in everywhere for pair in part]
        start = sum(count for count, _ in everywhere[: self.ranks.share])
        rows = {i: row for row, i in enumerate(chain.from_iterable(cuts), start)}
        return objective.batch_statistics(parts), rows

    def _cuts(self, sequences: Sequence[Sequence[Trajectory]], own: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this rank, as indices of all items."""
        cuts = micro_batches([sequences[i] for i in own], self.budget, share_prompt=self.model.share_prompt)
        return [[own[i] for i in cut] for cut in cuts]
