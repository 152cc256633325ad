"""One completion on its way to the trainer: host side, one sequence of a packed batch. For preference learning: pairs
of completions, and labeled completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from proxima.data.columns import Bools, Columns, ExpertIds, Floats, Ints, SamplingMask
from proxima.data.flow import Completion, Key, Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory(Columns):
    """Prompt, response and every per-token fact the update needs, before packing; see `Columns` for what a column
    accepts.

    Args:
        uid, sample, turn: the completion, or the path of an episode, that is the response; uid -1 for a trajectory that
            no engine generated.
        group: the same number for completions of one prompt. Trajectories of a group have equal `prompt_tokens`.
        prompt_tokens: [P] int32, token ids the response is conditioned on; at least one.
        tokens: [T] int32, response token ids; T may be 0.
        temperature: the sampling temperature; the trainer divides its logits by it; > 0.
        behavior_log_prob: [T] float32, nats, of policy μ: whichever of the engine's two log-probs the algorithm uses.
        policy_version: [T] int32, the version of the weights that sampled each token.
        truncated: the length limit ended the completion; the state after its last token is not terminal.
        advantage, reward, returns, value: [T] float32, reward units; `returns` is the target of the value.
        bootstrap: reward units, the value of the state after the last token; 0 where that state is terminal.
        score_variance: [T] float32, 1 − 2 π_t + Σ_v π_v², if a forward pass computed it.
        loss_mask, sampled: [T] bool; None is all True.
        echo: [T] float32, the weight of the token's cross-entropy, for observations that the policy learns to predict.
        taught: [T] int32, 1 where the token learns from the teacher alone, 0 where from rewards alone; None: from both.
        proximal_log_prob, next_log_prob, reference_log_prob: [T] float32, nats, if forward passes computed them.
        chained_log_ratio: [T] float32, nats, the bounded steps from μ to `next_log_prob`, of a `VersionChain`.
        top_k, behavior_top_k_log_prob: [T, K] int32 and float32 (nats), if requested from the engine.
        teacher_log_prob: [T] float32, nats, if requested from a teacher.
        bucket_token, teacher_bucket_log_prob: [T, J] int32 and float32 (nats), the tokens that have their own bucket in
            the divergence from the teacher, and the teacher's log-probs of them.
        routed_experts, prompt_routed_experts: [T, M, K] and [P, M, K], see `Completion`: the experts to which a policy
            that replays routing sends each token; where they are None or -1, its routers choose.
        sampling_mask: the tokens that could be sampled at each position. With it, every log-prob of the response is of
            the distribution over these tokens only, see `proxima.model.log_prob`; None: over the whole vocabulary.

    Raises:
        ValueError: the prompt is empty, the temperature is not > 0, or a column has the wrong dtype or length.
    """

    uid: int = -1
    sample: int = 0
    turn: int = 0
    group: int
    prompt_tokens: Ints
    tokens: Ints
    temperature: float = 1.0
    truncated: bool = False
    behavior_log_prob: Floats | None = None
    policy_version: Ints | None = None
    advantage: Floats = field(default_factory=lambda: np.zeros((), np.float32))
    reward: Floats | None = None
    returns: Floats | None = None
    value: Floats | None = None
    bootstrap: float = 0.0
    score_variance: Floats | None = None
    loss_mask: Bools | None = None
    sampled: Bools | None = None
    echo: Floats | None = None
    taught: Ints | None = None
    proximal_log_prob: Floats | None = None
    next_log_prob: Floats | None = None
    chained_log_ratio: Floats | None = None
    reference_log_prob: Floats | None = None
    top_k: Ints | None = None
    behavior_top_k_log_prob: Floats | None = None
    teacher_log_prob: Floats | None = None
    bucket_token: Ints | None = None
    teacher_bucket_log_prob: Floats | None = None
    sampling_mask: SamplingMask | None = None
    routed_experts: ExpertIds | None = None
    prompt_routed_experts: ExpertIds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.prompt_tokens):
            raise ValueError("Trajectory.prompt_tokens: empty; nothing would predict the first response token.")
        if not self.temperature > 0:
            reason = "a greedy completion has no log-probs to train on"
            raise ValueError(f"Trajectory.temperature={self.temperature} must be > 0: {reason}.")
        self.check_shapes(tokens=len(self.tokens), prompt_tokens=len(self.prompt_tokens), sampled=self.sampled)

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)

    @property
    def key(self) -> Key:
        """The `key` of the completion."""
        return self.uid, self.sample, self.turn

    @property
    def in_loss(self) -> Bools:
        """[T] bool, `loss_mask`, or all True."""
        if self.loss_mask is None:
            return np.ones(len(self.tokens), np.bool_)
        return self.loss_mask

    def bare(self) -> "Trajectory":
        """A copy with prompt, response, group and `sampled` (also as the loss mask), without any other column."""
        return self._of_tokens(self.tokens, self.sampled)

    def with_sentinel(self) -> "Trajectory":
        """A copy like `bare`, with one more token of id 0, the sentinel. A packed response's last token is not fed; the
        sentinel makes the response's own last token fed, and its hidden state available."""
        tokens = np.append(self.tokens, np.int32(0))
        sampled = self.sampled
        if sampled is not None:
            sampled = np.append(sampled, False)
        return self._of_tokens(tokens, sampled)

    def _of_tokens(self, tokens: Ints, sampled: Bools | None) -> "Trajectory":
        prompt = self.prompt_tokens
        return Trajectory(group=self.group, prompt_tokens=prompt, tokens=tokens, sampled=sampled, loss_mask=sampled)

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        completion: Completion,
        *,
        group: int,
        advantage: ArrayLike,
        behavior: str = "untruncated",
        routes: bool = False,
    ) -> "Trajectory":
        """The trajectory of a completion, or of one path of an episode; the loss mask has the tokens that the model
        wrote. `behavior` selects which of the engine's two log-probs is μ: `untruncated`, or `sampled`, which also
        takes the `sampling_mask`. `routes` takes the `routed_experts`. No column is copied."""
        if behavior == "untruncated":
            behavior_log_prob = completion.untruncated_log_prob
            sampling_mask = None
        else:
            behavior_log_prob = completion.sampled_log_prob
            sampling_mask = completion.sampling_mask
        routed_experts = None
        prompt_routed_experts = None
        if routes:
            routed_experts = completion.routed_experts
            prompt_routed_experts = completion.prompt_routed_experts
        return cls(
            uid=completion.prompt_uid,
            sample=completion.sample,
            turn=completion.turn,
            group=group,
            prompt_tokens=prompt.tokens,
            tokens=completion.tokens,
            temperature=completion.temperature,
            truncated=completion.truncated,
            behavior_log_prob=behavior_log_prob,
            policy_version=completion.policy_version,
            loss_mask=completion.sampled,
            sampled=completion.sampled,
            advantage=np.asarray(advantage, np.float32),
            top_k=completion.top_k,
            behavior_top_k_log_prob=completion.top_k_log_prob,
            sampling_mask=sampling_mask,
            routed_experts=routed_experts,
            prompt_routed_experts=prompt_routed_experts,
        )


@dataclass(frozen=True, kw_only=True)
class ChatExample:
    """A chat, or a side of a pair, whose trained turns are on several paths.

    Args:
        row: the row number in the data, which is also the `group` of the paths.
        paths: each trained turn is in the loss of exactly one path, after the tokens that an engine would have seen at
            that point. There are several if the chat template renders earlier turns anew, for example without their
            thoughts. They have the same prompt, and the tokens that two neighbours begin with are run once. `turn`
            numbers the paths of a side.
    """

    row: int
    paths: tuple[Trajectory, ...]


def paths_of(item: Trajectory | ChatExample) -> tuple[Trajectory, ...]:
    """The sequences of an example, or of a side; most have one."""
    if isinstance(item, ChatExample):
        return item.paths
    return (item,)


def loss_tokens(item: Trajectory) -> int:
    """The number of a trajectory's tokens that are in the loss."""
    if item.loss_mask is None:
        return len(item.tokens)
    return int(item.loss_mask.sum())


def trained_tokens(item: Trajectory | ChatExample) -> int:
    """The number of an example's tokens that are in the loss."""
    return sum(map(loss_tokens, paths_of(item)))


def with_paths(item: Trajectory | ChatExample, paths: Sequence[Trajectory]) -> Trajectory | ChatExample:
    """A copy with other sequences in place of its own."""
    if isinstance(item, ChatExample):
        return replace(item, paths=tuple(paths))
    return paths[0]


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two completions of one prompt, one preferred to the other. A completion of several turns may have several paths,
    see `ChatExample`; its log-prob is their sum.

    Args:
        row: the row number in the data, for messages; also the `group` of both sides, so that they share their prompt.
        chosen, rejected: each ends with the end-of-turn token; `sample` is 0 and 1.
        margin: how much better `chosen` is, reward units; None if the data has no margin.
    """

    row: int
    chosen: Trajectory | ChatExample
    rejected: Trajectory | ChatExample
    margin: float | None = None

    @property
    def sides(self) -> tuple[Trajectory, ...]:
        """The sequences for which a reference computes log-probs."""
        return (*paths_of(self.chosen), *paths_of(self.rejected))

    def with_sides(self, sides: Sequence[Trajectory]) -> "PreferencePair":
        """A copy with `sides`, which have further columns, in place of its own."""
        count = len(paths_of(self.chosen))
        chosen = with_paths(self.chosen, sides[:count])
        rejected = with_paths(self.rejected, sides[count:])
        return replace(self, chosen=chosen, rejected=rejected)


@dataclass(frozen=True, kw_only=True)
class LabeledCompletion:
    """A completion that is labeled good or bad, without a counterpart.

    Args:
        row: as in `PreferencePair`.
        completion: ends with the end-of-turn token.
        good: the label.
        mismatched: the same prompt with the completion of another row, from which KTO estimates its z; None until it is
            assigned.
    """

    row: int
    completion: Trajectory | ChatExample
    good: bool
    mismatched: Trajectory | ChatExample | None = None

    @property
    def sides(self) -> tuple[Trajectory, ...]:
        """The sequences for which a reference computes log-probs."""
        own = paths_of(self.completion)
        if self.mismatched is None:
            return own
        return (*own, *paths_of(self.mismatched))

    def with_sides(self, sides: Sequence[Trajectory]) -> "LabeledCompletion":
        """A copy with `sides`, which have further columns, in place of its own."""
        count = len(paths_of(self.completion))
        completion = with_paths(self.completion, sides[:count])
        mismatched = self.mismatched
        if mismatched is not None:
            mismatched = with_paths(mismatched, sides[count:])
        return replace(self, completion=completion, mismatched=mismatched)
