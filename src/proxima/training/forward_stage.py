"""Forward passes before the update of a step: each fills columns of the trajectories."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from proxima.data.columns import Floats
from proxima.data.packed_batch import PackedBatch
from proxima.data.shared_paths import packing_order
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import HostCopies
from proxima.model.lora_layers import adapter_off
from proxima.model.micro_batch import micro_batches
from proxima.model.packed_model import PackedModel
from proxima.model.routing import split_chosen
from proxima.training.ranks import ALONE, Ranks


class ForwardStage(Protocol):
    """A forward pass without gradient over a step's completions; `TrainStack.fill` splits them into micro-batches.

    It runs once per step, in the compute thread, under the weights at the start of the step: before the advantages and
    over all completions with a score if the advantage names `column` in its `needs`, otherwise after the selection and
    over the completions that are trained.

    column: the field of `Trajectory`, [T] float32, that it fills; a column that is already filled is kept. A stage that
        fills several columns names the one that shows whether it has run.
    on_rank_zero: of several ranks only the first runs it, because it queries others; without the attribute, all do.
    """

    @property
    def column(self) -> str: ...

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """The batch for `__call__`, on its device; usually `PackedModel.pack` of the model that runs it."""
        ...

    def __call__(self, batch: PackedBatch) -> Tensor | Mapping[str, Tensor]:
        """[N] float32, one number for each response token; a stage with several columns returns each by name, those of
        the prompts, [P] of each sequence, as `prompt_…`. A stage of values that packs a trajectory `with_sentinel`
        returns one more, the `bootstrap` of that trajectory."""
        ...


@torch.no_grad()
def stage_columns(
    stage: ForwardStage, trajectories: Sequence[Trajectory], budget: int, *, share_prompt: bool, ranks: Ranks = ALONE
) -> dict[str, list[Floats]]:
    """The columns that a stage fills, [T, …] of each trajectory, in micro-batches of at most `budget` tokens.
    Collective: each of several `ranks` fills those of its share, and those of all are on rank 0; the others return only
    their own, and empty ones for the rest."""
    order = packing_order([(trajectory,) for trajectory in trajectories])
    packed = [trajectories[i] for i in order]
    own = ranks.own([(item,) for item in packed], share_prompt=share_prompt)
    cuts = micro_batches([(packed[i],) for i in own], budget, share_prompt=share_prompt)
    idle = ranks.maximum(len(cuts)) - len(cuts)
    values = _filled(stage, [[packed[own[i]] for i in cut] for cut in cuts])
    for _ in range(idle):  # other ranks have more micro-batches, and wait for this one in each
        stage(stage.pack([min(packed, key=len)]))
    everywhere = ranks.gather_shares(([order[i] for i in own], values))
    out: dict[str, list[Any]] = {name: [()] * len(trajectories) for _, filled in everywhere for name in filled}
    for places, filled in everywhere:
        for name, columns in filled.items():
            for place, column in zip(places, columns, strict=True):
                out[name][place] = column
    return out


def _filled(stage: ForwardStage, batches: Sequence[Sequence[Trajectory]]) -> dict[str, list[Floats]]:
    """The columns of the trajectories of some micro-batches, in order."""
    out: dict[str, list[Floats]] = {stage.column: []}
    copies, parts = HostCopies(), list[tuple[str, Tensor, Sequence[int]]]()
    for trajectories in batches:
        batch = stage.pack(trajectories)
        outputs = stage(batch)
        for name, values in (outputs if isinstance(outputs, Mapping) else {stage.column: outputs}).items():
            prompts = (sum(end - start for start, end in spans) for spans in batch.prompts)
            sizes = tuple(prompts) if name.startswith("prompt_") else batch.tokens_of
            parts.append((name, copies.begin(values), sizes))
    copies.wait()
    for name, values, lengths in parts:
        out.setdefault(name, []).extend(np.split(values.numpy(), np.cumsum(lengths)[:-1]))
    return out


@dataclass(frozen=True)
class LogProbStage:
    """Log-probs, nats, under a policy: `proximal_log_prob` of the trained one, `reference_log_prob` of a frozen one, or
    of the trained one without its adapter, in which case the routers make their own choices.

    records_routes: also fills `routed_experts`, for later passes.
    """

    column: str
    policy: PackedModel
    adapter: bool = True
    records_routes: bool = False

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.policy.pack(trajectories, replay=self.adapter and not self.records_routes)

    def __call__(self, batch: PackedBatch) -> Tensor | Mapping[str, Tensor]:
        needs = frozenset({"routed_experts"} if self.records_routes else ())
        with self._policy_itself():
            outputs = self.policy(batch, needs)
        if not self.records_routes:
            return outputs.need("log_prob")

        return {self.column: outputs.need("log_prob"), **split_chosen(outputs.need("routed_experts"), batch)}

    def _policy_itself(self) -> AbstractContextManager[None]:
        """Within the block, the policy is without its adapter if that is not to be used."""
        if self.adapter:
            return nullcontext()

        return adapter_off(self.policy.model)
