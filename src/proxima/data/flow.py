"""The host side of the data: a prompt, its completions, their scores, and the three together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from proxima.data.columns import Bools, Columns, ExpertIds, Floats, Ints, SamplingMask, filled_by
from proxima.data.episode import Episode
from proxima.data.errors import UserError

FinishReason = Literal["stop", "length", "abort"]
REPAIR = "the engine is at fault: repair it or use another, and resume (--resume)"
Key = tuple[int, int, int]  # of a completion, from the engine to the Parquet: prompt uid, sample, turn
# {"role": "system" | "user" | "assistant" | "tool", "content": text, "images": numbers in the run, one for each
#  `<image>` of it, "raw": true for a text that the model reads as it is, without a chat template}, and what the data
#  has for the chat template: `task.published_chats` lists the other keys
Message = dict[str, Any]
IMAGE_PLACEHOLDER = "<image>"  # placeholder of an image in a text
ESCAPED_PLACEHOLDER = "< image>"  # the same as a text of its own
EVAL_UID = 1 << 40  # the first uid of held-out questions: their draws are never those of training


def prompt_name(uid: int) -> str:
    """A prompt in a message: `prompt 17`, and `held-out question 17` for row 17 of held-out data, counted from 0."""
    if uid < EVAL_UID:
        return f"prompt {uid}"
    return f"held-out question {uid - EVAL_UID}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt(Columns):
    """One question as the policy sees it.

    Args:
        uid: unique in a run and a function of the data order alone (epoch x size + position), so that random draws
            keyed by it are the same after a resume.
        messages: the chat before the chat template.
        tokens: [P] int32, token ids after the chat template, generation prompt included.
        begun: the beginning of the answer that `tokens` already has: a thought that the chat template opens, and the
            text of an answer that the data has begun. `Completion.text` begins with it.
        answer: the reference answer; any JSON value, None if no reward needs one.
        metadata: the other columns of the data (difficulty, source …), JSON values; rewards may read them.
        chat: the data holds the prompt as a list of messages, not as a text.
        shared_prefix: length of the prefix shared with other prompts of the data; 0: unknown.
        weight: of its advantages in the update; above 1 for a question that is asked less often than others.
    """

    not_json: ClassVar[tuple[str, ...]] = ("shared_prefix", "weight")

    uid: int
    messages: tuple[Message, ...]
    tokens: Ints
    begun: str = ""
    shared_prefix: int = 0
    weight: float = 1.0
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False

    @property
    def question(self) -> str:
        """The content of the last user message, for display."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion(Columns):
    """An engine's output for a prompt; see `Columns` for what a column accepts.

    Args:
        prompt_uid: the `uid` of the prompt.
        sample: 0 … G-1 within the prompt's group.
        turn: 0 for the first completion of a conversation, counting up.
        tokens: [T] int32, generated ids, the stop token included when one was sampled. T may be 0 (aborted at once).
        text: what the policy wrote, from the end of the chat's prefix to the end of the turn: the prompt's `begun`,
            then `tokens` decoded with control tokens, up to the end of the stop string that ended the completion,
            without the end-of-turn token. Defined in `model/chat/written_text.py`.
        sampled_log_prob: [T] float32, nats, of each token under the distribution that was actually sampled (temperature
            and truncation applied).
        untruncated_log_prob: [T] float32, the same with only the temperature applied, before top-k, top-p and min-p.
            The same array as `sampled_log_prob` when nothing is truncated.
        policy_version: [T] int32, the version of the weights that sampled each token.
        stopped_by: the stop string with which `text` ends; empty: none ended it. No file holds it.
        finish_reason: `stop` (stop token or string), `length` (`max_tokens` or the context is full), `abort`.
        temperature: the sampling temperature. The trainer divides its logits by this number. 0 is greedy; greedy
            log-probs are reported at temperature 1 and such completions are not used for training.
        top_k, top_k_log_prob: [T, K] int32 and float32, the K most probable tokens at each position and their
            untruncated log-probs, nats; None unless requested.
        sampling_mask: the tokens that could be sampled at each position, T sets, empty for tokens that are not
            `sampled`; None unless requested, and if nothing is truncated. Not passed to rewards.
        routed_experts: [T, M, K] int8, or int16 for more than 128 experts: the experts that each of the model's M MoE
            layers chose at the position whose state predicted the token, whether it was sampled or not; -1 where
            unknown. None unless requested. Not passed to rewards.
        prompt_routed_experts: [P, M, K], the same at the positions of the prompt.
        sampled: [T] bool, the tokens of an episode that are trained; False for those that the model did not write,
            whose log-probs are 0, and for those that it wrote under a grammar, whose log-probs are those under its
            mask. None: it wrote all of them freely.
        episode: the messages of an episode and how it ended; None for a single answer. `text` is then the model's last
            message, and `turn` is the number of the first turn that is sampled in this path.
        earlier: the other paths of the episode, in the order of their last turns; the episode's last turn is in this
            one. A new path begins when the template rewrites what the model has seen, or when an agent starts another
            conversation. Each sampled token is marked `sampled` in exactly one path.
        initial_prompt: the prompt that this path begins with, if it differs from the request's (in a `Group`, the
            group's): written by an environment in place of the row's, rewritten by the template after a turn, or that
            of an agent's other conversation. None: the prompt of the request.

    Raises:
        UserError: names the completion; a column has the wrong dtype or length, or a required one is missing.
    """

    not_json: ClassVar[tuple[str, ...]] = ("episode", "earlier", "initial_prompt")

    prompt_uid: int
    sample: int
    turn: int = 0
    tokens: Ints
    text: str
    sampled_log_prob: Floats
    untruncated_log_prob: Floats
    policy_version: Ints
    finish_reason: FinishReason
    temperature: float
    top_k: Ints | None = None
    top_k_log_prob: Floats | None = None
    sampling_mask: SamplingMask | None = None
    routed_experts: ExpertIds | None = None
    prompt_routed_experts: ExpertIds | None = None
    stopped_by: str = ""
    sampled: Bools | None = None
    episode: Episode | None = None
    earlier: tuple["Completion", ...] = ()
    initial_prompt: Prompt | None = None

    def __post_init__(self) -> None:
        """Validate as in `Columns`, but raise a UserError that names the completion: the engine is at fault."""
        object.__setattr__(self, "earlier", tuple(self.earlier or ()))  # JSON gives a list or None
        try:
            super().__post_init__()
            for column in filled_by("engine"):
                if column.required and getattr(self, column.name) is None:
                    raise ValueError(f"Completion.{column.name}: missing for {len(self.tokens)} tokens.")
            self.check_shapes(tokens=len(self.tokens), prompt_tokens=None, sampled=self.sampled)
        except ValueError as error:
            reason = str(error).removesuffix(".")
            raise UserError(f"{self._place}: {reason}", remedy=REPAIR) from error

    @classmethod
    def of_text(
        cls, uid: int, sample: int, text: str, tokens: Sequence[int] = (), finish_reason: FinishReason = "stop"
    ) -> "Completion":
        """A completion for scoring a text that no engine sampled: log-probs 0, version 0, temperature 1."""
        certain = np.zeros(len(tokens), np.float32)
        return cls(
            prompt_uid=uid,
            sample=sample,
            tokens=np.array(tokens, np.int32),
            text=text,
            sampled_log_prob=certain,
            untruncated_log_prob=certain,
            policy_version=np.zeros(len(tokens), np.int32),
            finish_reason=finish_reason,
            temperature=1.0,
        )

    def check_version(self, newest: int | None = None) -> None:
        """Raise a UserError that names the completion if a token's version is below 0 or above `newest`."""
        if not len(self.tokens):
            return
        first = int(self.policy_version.min())
        last = int(self.policy_version.max())
        problem = None
        if first < 0:
            problem = f"{first}, but versions begin with 0"
        elif newest is not None and last > newest:
            problem = f"{last}, but the weights are of {newest}"
        if problem is not None:
            raise UserError(f"{self._place}: Completion.policy_version: {problem}", remedy=REPAIR)

    @property
    def _place(self) -> str:
        """The completion in a message."""
        return f"{prompt_name(self.prompt_uid)}, sample {self.sample}, turn {self.turn}"

    def stopped_after(self, length: int) -> "Completion":
        """The completion as it was after `length` tokens, ended by `abort`. Its text then is not known, and empty."""
        columns: dict[str, Any] = {}
        for column in filled_by("engine"):
            values = getattr(self, column.name)
            if isinstance(values, SamplingMask):
                columns[column.name] = values.part(0, length)
            elif values is not None:
                columns[column.name] = values[:length]
        return replace(self, text="", stopped_by="", finish_reason="abort", **columns)

    @property
    def key(self) -> Key:
        """Prompt uid, sample and turn: unique in a run."""
        return self.prompt_uid, self.sample, self.turn

    def own_text(self, begun: str) -> str:
        """`text` without `begun`, the beginning that its prompt had, and without the stop string that ended it: what a
        chat API returns, and what a reward for the whole text compares."""
        return self.text.removeprefix(begun).removesuffix(self.stopped_by)

    @property
    def truncated(self) -> bool:
        """True when the length limit ended the completion."""
        return self.finish_reason == "length"

    @property
    def paths(self) -> tuple["Completion", ...]:
        """The paths of the episode, oldest first, this one last; without forks, only this one."""
        return (*self.earlier, self)

    @property
    def generated(self) -> int:
        """The number of tokens that the model wrote freely, over all paths; observations are not counted."""
        return sum(map(sampled_tokens, self.paths))

    @property
    def versions(self) -> Ints:
        """`policy_version` of the tokens that `generated` counts."""
        if self.sampled is None:
            return self.policy_version
        return np.concatenate([path.policy_version[path.sampled] for path in self.paths])


def sampled_tokens(path: Completion) -> int:
    """The number of tokens that the model wrote freely in this path alone."""
    if path.sampled is None:
        return len(path.tokens)
    return int(path.sampled.sum())


STOPPED = "stopped before its end: pruning keeps others of its group"  # `Score.error`


@dataclass(frozen=True, kw_only=True)
class Score:
    """The rewards of one completion, summed up.

    Args:
        value: the weighted sum of the rewards; NaN when `valid` is False.
        valid: False when a scorer failed or timed out; such a completion is left out of statistics and batches.
        parts: the value of each reward by name, before its weight.
        error: why `valid` is False, one line.
        correct: whether the answer is right; None if no reward decides. Accuracy is the mean.
        players: the scores of an episode's players by name, see `Episode.player`, if they differ; `value` is then that
            of the whole episode, which is only reported.
    """

    value: float
    valid: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    correct: bool | None = None
    players: Mapping[str, "Score"] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values, which `of_facts` reads; `players` only if not empty."""
        facts = asdict(replace(self, players={}))
        del facts["players"]
        if self.players:
            facts["players"] = {name: score.facts() for name, score in self.players.items()}
        return facts

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "Score":
        """Restore a score from its `facts`."""
        fields = dict(facts)
        players: Mapping[str, Any] = fields.get("players") or {}
        fields["players"] = {name: cls.of_facts(score) for name, score in players.items()}
        return cls(**fields)

    @classmethod
    def failed(cls, error: str) -> "Score":
        """An invalid score, as opposed to a reward of 0."""
        return cls(value=float("nan"), valid=False, error=error)

    @property
    def stopped(self) -> bool:
        """True if pruning stopped the completion before its end, see `StopRule`: it has no score, and none failed."""
        return self.error == STOPPED


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with all its completions and their scores, in the order of `sample`.

    Args:
        baseline: reward of the prompt's greedy completion, NaN if its scorer failed; None unless the advantage needs it
            (`remax`).

    Raises:
        ValueError: the numbers of scores and completions differ.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    baseline: float | None = None

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.completions):
            counts = f"{len(self.scores)} scores for {len(self.completions)} completions"
            raise ValueError(f"Group.scores: {counts} of {prompt_name(self.prompt.uid)}.")

    @property
    def paths(self) -> tuple[Completion, ...]:
        """The paths of all completions, in order."""
        return tuple(path for completion in self.completions for path in completion.paths)

    @cached_property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the tokens that the model wrote; None if it wrote none."""
        return min((int(c.versions.min()) for c in self.completions if c.generated), default=None)


def without_score(groups: Sequence[Group]) -> int:
    """Count the groups without a valid score."""
    return sum(not any(score.valid for score in group.scores) for group in groups)


def score_errors(groups: Sequence[Group]) -> str:
    """Join the distinct errors of the failed scores, at most three."""
    errors: list[str] = []
    for group in groups:
        for score in group.scores:
            error = str(score.error)
            if not score.valid and not score.stopped and error not in errors:
                errors.append(error)
    shown = errors[:3]
    if len(errors) > 3:
        shown.append(f"and {len(errors) - 3} more")
    return "; ".join(shown)
