"""Forward passes before the update of a step: each fills columns of the trajectories.

`LogProbStage` runs the policy or a frozen copy, `ScoreVarianceStage` fills a column for `optimal_token_baseline`,
`TeacherStage` runs the teacher of a distillation, `EngineStage` queries an engine. The critic's stage is in `critic`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.flow import REPAIR
from proxima.data.packed_batch import PackedBatch, pack, packing_order
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import HostCopies
from proxima.engine.protocol import Engine, ScoreRequest, close_engine
from proxima.model.adapters.lora import adapter_off
from proxima.model.log_prob import TopTokens, top_k_log_prob
from proxima.model.moe import split_chosen
from proxima.model.packed_model import PackedModel
from proxima.model.policy import Policy
from proxima.training.dealing import cuts_of_shares
from proxima.training.ranks import ALONE, Ranks


class ForwardStage:
    """A forward pass without gradient over a step's completions; `TrainStack.fill` splits them into micro-batches.

    It runs once per step, in the compute thread, under the weights at the start of the step: before the advantages and
    over all completions with a score if the advantage names `column` in its `needs`, otherwise after the selection and
    over the completions that are trained.

    column: the field of `Trajectory`, [T] float32, that it fills; if all trajectories have it, the stage does not run.
        A stage that fills several columns names the one that shows whether it has run.
    on_rank_zero: only rank 0 runs it, because it queries a server; otherwise all ranks do.
    """

    on_rank_zero: ClassVar[bool] = False

    column: str

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """The batch for `__call__`, on its device; usually `PackedModel.pack` of the model that runs it."""
        raise NotImplementedError

    def __call__(self, batch: PackedBatch) -> Tensor | Mapping[str, Tensor]:
        """[N] float32, one number for each response token. A stage with several columns returns them by name; columns
        of the prompts, joined over the sequences, are named `prompt_…`. For a trajectory packed `with_sentinel`, a
        value stage returns one more number, its `bootstrap`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the resources of the stage; by default it has none."""


@dataclass(frozen=True)
class StageShare:
    """What a rank fills of the columns of a stage.

    Args:
        places: of the trajectories, in their order below, among all those that are filled.
        batches: the trajectories of each micro-batch.
        idle: one for each pass that other ranks make more; its columns are not read.
    """

    places: Sequence[int]
    batches: Sequence[Sequence[Trajectory]]
    idle: Sequence[Trajectory] = ()


def stage_shares(
    trajectories: Sequence[Trajectory], shares: int, budget: int, *, share_prompt: bool, pair_cost: float = 0.0
) -> list[StageShare]:
    """Deal trajectories to the ranks' shares, in micro-batches of at most `budget` tokens; see `deal`."""
    order = packing_order([(trajectory,) for trajectory in trajectories])
    packed = [trajectories[i] for i in order]
    items = [(item,) for item in packed]
    dealt = cuts_of_shares(items, shares, budget, pair_cost=pair_cost, share_prompt=share_prompt)
    passes = max(map(len, dealt))
    out: list[StageShare] = []
    for cuts in dealt:
        idle: list[Trajectory] = []
        if packed:
            shortest = min(packed, key=len)
            idle = [shortest] * (passes - len(cuts))
        places = [order[i] for i in chain.from_iterable(cuts)]
        batches = [[packed[i] for i in cut] for cut in cuts]
        out.append(StageShare(places, batches, idle))
    return out


@torch.no_grad()
def stage_columns(
    stage: ForwardStage, shares: Sequence[StageShare] | None, ranks: Ranks = ALONE
) -> dict[str, list[Floats]]:
    """The columns that a stage fills, [T, …] for each trajectory, in order, on rank 0, which alone has the `shares`;
    nothing on the other ranks. Collective."""
    make: Callable[[int], StageShare] | None = None
    if shares is not None:
        make = shares.__getitem__
    own = ranks.scatter(make)
    values = _filled(stage, own.batches)
    for trajectory in own.idle:
        stage(stage.pack([trajectory]))
    everywhere = ranks.gather_shares((own.places, values))
    if shares is None:
        return {}
    count = sum(len(share.places) for share in shares)
    out: dict[str, list[Any]] = {}
    for places, filled in everywhere:
        for name, columns in filled.items():
            of_all = out.setdefault(name, [()] * count)
            for place, column in zip(places, columns, strict=True):
                of_all[place] = column
    return out


def _filled(stage: ForwardStage, batches: Sequence[Sequence[Trajectory]]) -> dict[str, list[Floats]]:
    """The columns of the trajectories of some micro-batches, in order."""
    out: dict[str, list[Floats]] = {stage.column: []}
    copies = HostCopies()
    parts = list[tuple[str, Tensor, Sequence[int]]]()
    for trajectories in batches:
        batch = stage.pack(trajectories)
        outputs = stage(batch)
        if not isinstance(outputs, Mapping):
            outputs = {stage.column: outputs}
        for name, values in outputs.items():
            sizes = batch.tokens_of
            if name.startswith("prompt_"):
                sizes = tuple(sum(end - start for start, end in spans) for spans in batch.prompts)
            parts.append((name, copies.begin(values), sizes))
    copies.wait()
    for name, values, lengths in parts:
        out.setdefault(name, []).extend(np.split(values.numpy(), np.cumsum(lengths)[:-1]))
    return out


@dataclass(frozen=True)
class LogProbStage(ForwardStage):
    """Fills log-probs, nats, under a policy: `proximal_log_prob` by the trained one, `reference_log_prob` by a frozen
    one, or by the trained one without its adapter, whose MoE routers then make their own choices.

    records_routes: also fill `routed_experts`, for later passes.
    """

    column: str
    policy: PackedModel
    adapter: bool = True
    records_routes: bool = False

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.policy.pack(trajectories, replay=self.adapter and not self.records_routes)

    def __call__(self, batch: PackedBatch) -> Tensor | Mapping[str, Tensor]:
        needs: frozenset[str] = frozenset()
        if self.records_routes:
            needs = frozenset({"routed_experts"})
        with self._policy_itself():
            outputs = self.policy(batch, needs)
        if not self.records_routes:
            return outputs.need("log_prob")

        routes = split_chosen(outputs.need("routed_experts"), batch)
        return {self.column: outputs.need("log_prob"), **routes}

    def _policy_itself(self) -> AbstractContextManager[None]:
        """Within the block, the policy runs without its adapter unless `adapter` is set."""
        if self.adapter:
            return nullcontext()

        return adapter_off(self.policy.model)


@dataclass(frozen=True)
class ScoreVarianceStage(ForwardStage):
    """Fills `score_variance`, 1 − 2 π_t + Σ_v π_v², under the trained policy, for `optimal_token_baseline`."""

    policy: PackedModel
    column: str = "score_variance"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.policy.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> Tensor:
        outputs = self.policy(batch, frozenset({"log_sum_square"}))
        return 1 - 2 * outputs.need("log_prob").exp() + outputs.need("log_sum_square").exp()


@dataclass(frozen=True, kw_only=True)
class TeacherStage(ForwardStage):
    """A forward pass of the teacher, at the sampling temperature of the tokens.

    Args:
        policy: the teacher.
        top_k: number of tokens with a separate bucket; 0: none.
        top_k_of: whose most probable tokens have buckets: the teacher's, or the student's, the first `top_k` that the
            engine reported.
        vocabulary: ids below it are also tokens of the student; the teacher's rest bucket contains all others.

    Raises: UserError if a completion has a token that the teacher's output layer lacks; ValueError if the student's top
        K is not in the trajectories.

    Fills `teacher_log_prob` [N], and with top_k `bucket_token` [N, K] and `teacher_bucket_log_prob` [N, K].
    """

    policy: Policy
    top_k: int
    top_k_of: Literal["teacher", "student"]
    vocabulary: int
    column: str = "teacher_log_prob"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        highest = 0
        for item in trajectories:
            for ids in (item.tokens, item.top_k):
                if ids is not None and ids.size:
                    highest = max(highest, int(ids.max()))
        rows = self.policy.head.out_features
        if highest >= rows:
            reason = f"a completion has token {highest}, from the padding of the student's output layer"
            raise UserError(f"{reason}; the teacher's has only {rows} rows", remedy="use a teacher with as many rows")
        return self.policy.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> dict[str, Tensor]:
        if self.top_k and self.top_k_of == "student":
            if batch.top_k is None:
                raise ValueError("the student's top K is not in the trajectories: set engine.top_k_log_probs")
            ids = batch.top_k[:, : self.top_k]
            outputs = self.policy(replace(batch, top_k=None, behavior_top_k_log_prob=None, bucket_token=ids))
            log_prob = outputs.need("log_prob")
            top = outputs.need("bucket_log_prob")
        else:
            log_prob, ids, top = top_tokens(self.policy, batch, self.top_k, self.vocabulary)
        columns = {self.column: log_prob}
        if self.top_k:
            columns["bucket_token"] = ids
            columns["teacher_bucket_log_prob"] = top
        return columns


@torch.no_grad()
def top_tokens(policy: Policy, batch: PackedBatch, k: int, vocabulary: int) -> TopTokens:
    """`top_k_log_prob` of the targets of a batch, at its temperature, under a policy."""
    if len(batch.target) == 0:
        policy.idle_pass(backward=False)
        empty = torch.zeros(0, k, device=policy.device)
        return TopTokens(empty.sum(1), empty.long(), empty)

    def outputs(part: PackedBatch) -> dict[str, Tensor]:
        with policy.autocast():
            top = top_k_log_prob(
                policy.hidden(part),
                target=part.target,
                temperature=part.temperature,
                k=k,
                **policy.head_parts(),
                vocabulary=vocabulary,
                chunk=policy.log_prob_chunk,
            )
        return top._asdict()

    return TopTokens(**policy.run(outputs, batch))


@dataclass(frozen=True, kw_only=True)
class EngineStage(ForwardStage):
    """Fills a column [N] with log-probs, nats, from a scoring engine, at the sampling temperature of the tokens.

    Args:
        column: `reference_log_prob` or `teacher_log_prob`.
        engine: one whose weights do not change.

    Raises:
        UserError: the engine returned another number of log-probs than there are tokens, or NaN.
    """

    on_rank_zero: ClassVar[bool] = True

    column: str
    engine: Engine
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return pack(trajectories, share_prompt=False)  # each prompt before its response, to read off requests

    def __call__(self, batch: PackedBatch) -> Tensor:
        prompts = np.split(batch.tokens.numpy(), batch.edges[1:-1])[::2]
        edges = batch.cu_seqlens[1:-1].tolist()
        targets = np.split(batch.target.numpy(), edges)
        temperatures = np.split(batch.temperature.numpy(), edges)
        requests: list[ScoreRequest] = []
        for prompt, tokens, temperature in zip(prompts, targets, temperatures, strict=True):
            if len(tokens):
                request = ScoreRequest(prompt_tokens=prompt, tokens=tokens, temperature=float(temperature[0]))
                requests.append(request)
        scores = self.runner.run(self.engine.score(requests))
        self._check(requests, scores)
        return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *scores]))

    def _check(self, requests: Sequence[ScoreRequest], scores: Sequence[Floats]) -> None:
        """Require one number for each token: a column shifted by one would train on the wrong tokens."""
        expected = [len(request.tokens) for request in requests]
        scored = [len(column) for column in scores]
        if expected != scored:
            counts = (
                f"{sum(scored)} log-probs of {len(scored)} completions for {sum(expected)} tokens of {len(expected)}"
            )
            raise UserError(f"{self.column}: the scoring engine returned {counts}", remedy=REPAIR)
        lost = sum(int(np.isnan(column).sum()) for column in scores)
        if lost > 0:
            reason = f"the scoring engine returned NaN for {lost} of {sum(expected)} tokens"
            raise UserError(f"{self.column}: {reason}", remedy=REPAIR)

    def close(self) -> None:
        """Close the engine. The runner stays open: it can't be closed while the event loop of a run is running."""
        close_engine(self.engine)
