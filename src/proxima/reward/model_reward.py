"""A reward model in this process: a decoder with a scalar head that scores prompt and completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from proxima.data import FieldError, UserError, renamed, require
from proxima.data.field_checks import check_choices
from proxima.data.flow import Completion, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.model.chat.answer import read_tokens
from proxima.model.chat.encode import is_begun
from proxima.model.positions import fix_positions, require_known_length, require_length
from proxima.model.precision import ComputeDtype, compute_dtype
from proxima.model.pretrained import DTYPES, auto_device, check_device, load_tokenizer, require_rows
from proxima.model.proof import proof_before_loading
from proxima.model.scalar_model import ScalarModel, load_scalar_model, scalar_config, score_normalization
from proxima.reward.base import WeightedReward


@dataclass(frozen=True, kw_only=True)
class ModelReward(WeightedReward):
    """The score of a reward model: its scalar head after the last token of prompt and completion.

    The weights are frozen and stay in memory alongside the policy. The completions of a prompt are scored together in
    the thread of the tensor work, and the prompt is fed once. Values equal those of Hugging Face's own forward pass
    (`AutoModelForSequenceClassification`), so a folder from another trainer works too.

    Args:
        path: Hugging Face folder or hub name of a sequence-classification model with one label, as `proxima train`
            writes it.
        revision: hub revision.
        encode: `tokens`: the token ids that the policy sampled; refused if the policy's vocabulary differs.
            `text`: messages and text through the reward model's own chat template and tokenizer; for models with
            another vocabulary.
        normalize: subtract the mean and divide by the standard deviation that training measured on held-out completions
            and wrote to config.json; refused if they are missing there.
        end_truncated: append the end-of-turn token, with which all training completions of a reward model end, to a
            completion that was cut off; false: score it after its last token, a position that had no score in training
            and where a policy may find high ones.
        max_tokens: maximum tokens of prompt and completion; longer ones get no score. null: the model's own limit.
            Required for a model with longrope positions: it selects their factors, as `model.max_length` does for a
            policy.
        tokens_per_forward: tokens of one forward pass; a longer completion gets its own pass.
        dtype: of the weights, `float32` or `bfloat16`.
        compute_dtype: of the matrix products: `float32`, `bfloat16`, or `auto`, the faster one on this machine; the
            head is float32.
        device: auto, cpu, cuda, cuda:1.
    Returns: Score in units of the reward model; no `correct`.
    Raises: FieldError before the run if the folder is not a supported reward model, the device is missing, or
        `max_tokens` exceeds the model's own limit; nothing during a run.
    Edge cases: an empty completion gets the score of its prompt. No score: a value that is not finite, a completion
        that is too long, and with `text` one that the chat template refuses. A truncated completion without room for
        the end-of-turn token is scored without it. With `text`, if the tokenizer joins the first token of a completion
        with the prompt's last (both are line ends), the chat is scored with the joined token.
    """

    path: str
    revision: str | None = None
    encode: Literal["tokens", "text"] = "tokens"
    normalize: bool = False
    end_truncated: bool = True
    max_tokens: int | None = None
    tokens_per_forward: int = 8192
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: ComputeDtype = "auto"
    device: str = "auto"

    kind = "model"
    where = "compute"
    whole_group = True
    concurrency = 1
    call_timeout = 600.0  # has no effect in the thread of the tensor work, where a call runs to its end

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        require(bool(self.path), "path", self.path, "must name the folder of a reward model")
        require(self.max_tokens is None or self.max_tokens >= 2, "max_tokens", self.max_tokens, "must be >= 2")
        require(self.tokens_per_forward >= 1, "tokens_per_forward", self.tokens_per_forward, "must be >= 1")

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_device() if field == "device" else None

    def check(self) -> None:
        check_device(self.device)
        with renamed("model.path", "path"), renamed("model.max_length", "max_tokens"):
            config, _ = scalar_config(self.path, self.revision)
            require_rows(self.path, load_tokenizer(self.path, self.revision), config)
            require_length(config, self.max_tokens)
        require_known_length(config, self.max_tokens, "max_tokens")
        try:
            proof_before_loading(config, self.max_tokens, scalar=True).attention()
        except UserError as error:
            raise FieldError("path", self.path, f"can't score: {error.reason}", remedy=error.remedy) from error
        measured = not self.normalize or score_normalization(config) is not None
        remedy = "train it with eval.task, or set normalize=false"
        require(measured, "normalize", True, f"{self.path} holds no mean and deviation of its scores", remedy=remedy)

    def check_vocabulary(self, policy: Any) -> None:
        """Refuse `encode: tokens` for a policy with another vocabulary.

        Args:
            policy: its tokenizer.

        Raises:
            FieldError: the ids of some token differ.
        """
        if self.encode == "tokens":
            with renamed("model.path", "path"):
                vocabulary = load_tokenizer(self.path, self.revision).get_vocab()
            differing = sum(vocabulary.get(token) != i for token, i in policy.get_vocab().items())
            reason = f"needs the policy's vocabulary, and {differing:,} of its tokens differ in {self.path}"
            require(differing == 0, "encode", "tokens", reason, remedy="set encode=text")

    def load(self) -> None:
        """Load the weights, unless already loaded."""
        _ = self._scorer

    @cached_property
    def _scorer(self) -> ScalarModel:
        with renamed("model.path", "path"):
            loaded = load_scalar_model(
                self.path,
                dtype=DTYPES[self.dtype],
                revision=self.revision,
                device=self.device,
                max_length=self.max_tokens,
            )
        fix_positions(loaded.model, self.max_tokens, loaded.max_length, "max_tokens of the reward")
        loaded.model.requires_grad_(False)
        computed = compute_dtype(self.compute_dtype, loaded.model.device, DTYPES[self.dtype])
        return ScalarModel(loaded, compute_dtype=computed)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        rows: dict[int, Trajectory] = {}
        scores: list[Score] = []
        longest = self._scorer.loaded.max_length
        limit = min(self.max_tokens or longest, longest)
        room = limit if self.end_truncated else 0
        for i, completion in enumerate(completions):
            try:
                row = self._trajectory(prompt, completion, room)
            except UserError as error:
                scores.append(Score.failed(str(error)))
                continue
            if len(row) <= limit:
                rows[i] = row
            scores.append(Score.failed(f"prompt and completion have {len(row)} tokens, the limit is {limit}"))
        for i, value in zip(rows, self._scorer.scores(list(rows.values()), self.tokens_per_forward), strict=True):
            scores[i] = Score(value=float(self._normalized(value)))
        return scores

    @cached_property
    def _end(self) -> int | None:
        """The token that ends a turn in the reward model's chat template, or its end-of-text token without a
        template."""
        tokenizer: Any = self._scorer.loaded.tokenizer
        if tokenizer.chat_template is None:
            end: int | None = tokenizer.eos_token_id
            return end
        return int(read_tokens([{"role": "user", "content": "?"}], ".", tokenizer)[1][-1])

    def _normalized(self, values: Any) -> Any:
        mean = 0.0
        deviation = 1.0
        known = score_normalization(self._scorer.model.config) if self.normalize else None
        if known:
            mean, deviation = known
        return (values - mean) / deviation

    def _trajectory(self, prompt: Prompt, completion: Completion, room: int) -> Trajectory:
        """The model input; a truncated completion gets an end-of-turn token if the total stays within `room` tokens."""
        if self.encode == "tokens":
            reason = "reads the prompt's tokens, and there are none"
            require(len(prompt.tokens) > 0, "encode", "tokens", reason, remedy="set encode=text")
            group = prompt.uid
            before = prompt.tokens
            tokens = completion.tokens
        else:
            messages = prompt.messages
            if is_begun(messages) and completion.text.startswith(messages[-1]["content"]):
                messages = messages[:-1]  # the text begins with it
            before, tokens = read_tokens(messages, completion.text, self._scorer.loaded.tokenizer)
            if completion.finish_reason != "stop":
                tokens = tokens[:-1]  # the model did not end its turn
            group = int.from_bytes(sha256(before.tobytes()).digest()[:7])  # the same for all that share a prompt
        if completion.finish_reason != "stop" and len(before) + len(tokens) < room and self._end is not None:
            tokens = np.append(tokens, np.int32(self._end))
        return Trajectory(group=group, prompt_tokens=before, tokens=tokens)
