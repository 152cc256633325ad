"""What the trainer says of tokens that an engine has sampled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data.columns import Floats, Ints
from proxima.data.trajectory import Trajectory
from proxima.engine.protocol import Sampling
from proxima.model.policy import Policy
from proxima.training.forward_stage import LogProbStage, stage_columns, stage_shares


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineAnswer:
    """Tokens that an engine has sampled after a prompt.

    Args:
        group: the same number for answers to one prompt.
        prompt_tokens: [P] int32.
        tokens: [T] int32.
        reported: [T] float32, nats, the engine's log-probs of them.
        sampling: whose distribution these are of: the one asked for, without truncation where they are those before it.
    """

    group: int
    prompt_tokens: Ints
    tokens: Ints
    reported: Floats
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, eq=False)
class Stated:
    """The distribution q that an engine is asked to sample an answer from, by the trainer's logits; see `Sampling`.

    Args:
        log_prob: [T] nats, log q of the sampled tokens; minus infinity for those that truncation leaves out.
        mean, variance: [T] nats and nats², of log q of a token that is drawn from q.
    """

    log_prob: Floats
    mean: Floats
    variance: Floats


class TrainerView:
    """The trained model, in the packed passes in which it is trained.

    Args:
        tokens: of a packed pass, `train.tokens_per_micro_batch`.
    """

    def __init__(self, policy: Policy, tokens: int) -> None:
        self.policy = policy
        self.tokens = tokens
        self.vocabulary = int(policy.model.config.get_text_config().vocab_size)

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        module: nn.Module = self.policy.model
        return module

    def reported(self, answers: Sequence[EngineAnswer]) -> list[Floats]:
        """[T] nats of each answer's tokens, under the distribution that the engine's log-probs are of."""
        sampling = answers[0].sampling
        if sampling.truncates:
            return [self.stated(answer, sampling).log_prob for answer in answers]
        return self.log_prob(answers, sampling.temperature)

    def log_prob(self, answers: Sequence[EngineAnswer], temperature: float) -> list[Floats]:
        """[T] nats of each answer's tokens, under softmax(logits / temperature)."""
        column = "proximal_log_prob"
        trajectories = [_trajectory(answer, temperature) for answer in answers]
        shares = stage_shares(trajectories, 1, self.tokens, share_prompt=self.policy.share_prompt)
        return stage_columns(LogProbStage(column, self.policy), shares)[column]

    @torch.no_grad()
    def stated(self, answer: EngineAnswer, sampling: Sampling) -> Stated:
        """The stated distribution at the positions of an answer."""
        ids = np.arange(self.vocabulary, dtype=np.int32)
        everything = np.broadcast_to(ids, (len(answer.tokens), self.vocabulary))
        batch = self.policy.pack([_trajectory(answer, sampling.temperature, everything)])
        rows = after_truncation(self.policy(batch).need("top_k_log_prob").double(), sampling)
        probability = rows.exp()
        finite = rows.where(probability > 0, 0.0)
        mean = (probability * finite).sum(1)
        variance = (probability * finite.square()).sum(1) - mean.square()
        tokens = torch.as_tensor(answer.tokens, device=rows.device).long()
        drawn = rows.gather(1, tokens[:, None]).squeeze(1)
        return Stated(log_prob=_floats(drawn), mean=_floats(mean), variance=_floats(variance))


def _floats(values: Tensor) -> Floats:
    on_host: Floats = values.cpu().numpy()
    return on_host


def after_truncation(rows: Tensor, sampling: Sampling) -> Tensor:
    """[T, V] log-probs after top-k, then top-p, then min-p, renormalised: minus infinity for what they leave out."""
    if not sampling.truncates:
        return rows
    ordered, order = rows.sort(dim=1, descending=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
        ordered = ordered.log_softmax(1)
    probability = ordered.exp()
    before = probability.cumsum(1) - probability
    kept = (before < sampling.top_p) & (probability >= sampling.min_p * probability[:, :1])
    ordered = ordered.masked_fill(~kept, -torch.inf).log_softmax(1)
    return torch.full_like(rows, -torch.inf).scatter(1, order, ordered)


@contextmanager
def weights_rounded_to(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block the weights have the values that they have in `dtype`; afterwards their own, exactly."""
    kept = [(parameter, parameter.data) for parameter in module.parameters() if parameter.is_floating_point()]
    try:
        for parameter, data in kept:
            parameter.data = data.to(dtype).to(data.dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _trajectory(answer: EngineAnswer, temperature: float, top_k: Ints | None = None) -> Trajectory:
    return Trajectory(
        group=answer.group,
        prompt_tokens=answer.prompt_tokens,
        tokens=answer.tokens,
        temperature=temperature,
        top_k=top_k,
    )
