"""The teacher's forward pass, once per step in distillation: log-probs of response tokens, and of those with a
bucket."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from proxima.data import UserError
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.distribution_figures import TopTokens, top_k_log_prob
from proxima.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class TeacherStage:
    """A forward pass of the teacher, at the sampling temperature of the tokens.

    Args:
        policy: the teacher.
        top_k: number of tokens with a separate bucket; 0: none.
        top_k_of: the model whose most probable tokens are used: the teacher, or the student, with the first `top_k`
            that the engine reported.
        vocabulary: ids below it are also tokens of the student; the teacher's rest bucket has all others.

    Raises: UserError where a completion has a token that the teacher's output layer lacks.

    Fills `teacher_log_prob` [N], and with top_k `bucket_token` [N, K] and `teacher_bucket_log_prob` [N, K].
    """

    policy: Policy
    top_k: int
    top_k_of: Literal["teacher", "student"]
    vocabulary: int
    column: str = "teacher_log_prob"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        looked_up = (ids for item in trajectories for ids in (item.tokens, item.top_k) if ids is not None and ids.size)
        highest = max((int(ids.max()) for ids in looked_up), default=0)
        if highest >= (rows := self.policy.head.out_features):
            reason = f"token {highest} of a completion, padding of the student's output layer, is beyond the teacher's"
            raise UserError(f"{reason}, which has {rows} rows", remedy="use a teacher with as many rows")
        return self.policy.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> dict[str, Tensor]:
        if self.top_k and self.top_k_of == "student":
            if batch.top_k is None:
                raise ValueError("the student's top K is not in the trajectories: set engine.top_k_log_probs")
            ids = batch.top_k[:, : self.top_k]
            outputs = self.policy(replace(batch, top_k=None, behavior_top_k_log_prob=None, bucket_token=ids))
            log_prob, top = outputs.need("log_prob"), outputs.need("bucket_log_prob")
        else:
            log_prob, ids, top = top_tokens(self.policy, batch, self.top_k, self.vocabulary)
        buckets = {"bucket_token": ids, "teacher_bucket_log_prob": top} if self.top_k else {}
        return {self.column: log_prob, **buckets}


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
