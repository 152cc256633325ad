"""A judge: a language model behind any server of chat completions scores answers, each alone or a group together."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean, pstdev
from time import monotonic
from typing import Any, Literal

from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward
from proxima.reward.function import messages_of
from proxima.reward.judge_prompt import RUBRIC, Asked, JudgedQuestion, Verdict, asked, read_verdict
from proxima.reward.posting import (
    PostFailed,
    PostLimits,
    UnusableError,
    bearer_token,
    check_url,
    post,
    require_reachable,
    token_note,
    without,
)
from proxima.reward.verdicts import GivenVerdict, Verdicts
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json
from proxima.system.jsonl import dumps

Grammar = Literal["auto", "json_schema", "json_object", "none"]
PATH = "/chat/completions"
RESPONSE_BYTES = 4 << 20
NO_GRAMMAR = frozenset({400, 415, 422, 501})  # what servers answer to a `response_format` that they don't have
TRIED = JudgedQuestion("What is 1 + 1?", "2"), "2"
MILLION = 1e6


@dataclass(frozen=True, kw_only=True)
class Judge(WeightedReward):
    """The verdict of a language model on an answer, or on the answers of a group compared with each other.

        value = mean over `repeat` verdicts of number / scale, in [0, 1]

    The judge gets the question, the answer or the group's different answers, and the row's right answer if there is
    one. What the policy wrote is data: it stands between lines with a marker that it can't guess, control tokens in it
    are broken, and answers that are compared are shuffled. The verdict is JSON, by a grammar where the server has one,
    and otherwise refused unless it is that JSON alone.

    A verdict is asked for once. A run keeps it in `verdicts.jsonl`, so that a resume repeats steps with the same
    scores. The parts `tokens`, `seconds` and `price` say what the completion's verdicts cost when they were asked
    for, a comparison's divided by its answers; `disagreement` is the standard deviation of the values over `repeat`,
    and `retries` the requests beyond the first.

    Args:
        url: the server's address as OpenAI's client takes it, `http://localhost:8000/v1`; the proxies of the
            environment are used, except for this machine.
        model: the judge's name there.
        rubric: the criterion, which the judge reads as an instruction.
        compare: judge all answers of a prompt in one request, relative to each other; false: each by itself.
        show_answer: show the row's right answer, where it has one.
        transcript: of an episode, show all its messages; false: the model's last message.
        scale: the largest number of a verdict; >= 1.
        correct_from: the least value that counts as correct; null: accuracy is not measured.
        repeat: verdicts for each answer, whose mean counts; with other orders of the answers in a comparison, otherwise
            with other draws.
        temperature: of the judge's sampling; 0 is greedy.
        seed: of the orders, and sent to the server for its draws.
        grammar: `json_schema` and `json_object` are sent as `response_format`; `none` sends none; `auto` sends the
            schema, and nothing if the server refuses that.
        max_tokens: of a verdict, with its reason.
        request: further fields of the request, such as `{reasoning_effort: low}`; a null removes one.
        characters: of the question and of each answer; the middle of a longer one is left out.
        seconds: until a verdict must be there, with all attempts and the waits between them; the wait for one of
            `max_concurrent` places does not count.
        retries: attempts after the first, also after a verdict that can't be read; >= 0.
        backoff: seconds before the second attempt, doubled before each further one; a longer `Retry-After` takes
            precedence; at most 30 at a time.
        max_concurrent: simultaneous requests, over all prompts; >= 1.
        token_env: name of the environment variable with the server's key; null: none is sent. The key itself is never
            written anywhere.
        prices: of a million tokens read, and of a million written, in any currency; null: no part `price`.
    Returns: Score in [0, 1]; `correct` if `correct_from` is set. An answer without text has the value 0, and is not
        asked about.
    Raises: FieldError at construction for an invalid field; `score` raises PostFailed, or UnusableError for a verdict
        that no attempt made readable, and the completion has no score, of a comparison all of them.
    Edge cases: equal answers of a group are shown once, and have equal scores.
    """

    url: str
    model: str
    rubric: str = RUBRIC
    compare: bool = False
    show_answer: bool = True
    transcript: bool = False
    scale: int = 10
    correct_from: float | None = None
    repeat: int = 1
    temperature: float = 0.0
    seed: int = 0
    grammar: Grammar = "auto"
    max_tokens: int = 512
    request: Mapping[str, Any] | None = None
    characters: int = 20_000
    seconds: float = 120.0
    retries: int = 3
    backoff: float = 0.5
    max_concurrent: int = 8
    token_env: str | None = None
    prices: tuple[float, float] | None = None

    kind = "judge"
    is_judged = True
    measured_parts = ("tokens", "seconds", "price", "retries")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_url(self.url, "http://localhost:8000/v1")
        require(bool(self.model), "model", self.model, "must name the judge's model")
        require(bool(self.rubric.strip()), "rubric", self.rubric, "must say what a good answer is")
        require(1 <= self.scale <= 1000, "scale", self.scale, "must be in [1, 1000]")
        require(self.repeat >= 1, "repeat", self.repeat, "must be >= 1")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "must be >= 0")
        varies = self.repeat == 1 or self.compare or self.temperature > 0
        remedy = "set temperature, or compare=true, where the orders differ"
        require(varies, "repeat", self.repeat, "asks for the same greedy verdict again", remedy=remedy)
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be >= 1")
        require(self.characters >= 100, "characters", self.characters, "must be >= 100")
        require(0 < self.seconds < math.inf, "seconds", self.seconds, "must be > 0 and finite")
        require(self.retries >= 0, "retries", self.retries, "must be >= 0")
        require(0 <= self.backoff < math.inf, "backoff", self.backoff, "must be >= 0 seconds and finite")
        require(self.max_concurrent >= 1, "max_concurrent", self.max_concurrent, "must be >= 1")
        bound = "must be two prices of a million tokens, read and written, >= 0"
        priced = self.prices is None or (len(self.prices) == 2 and all(0 <= price < math.inf for price in self.prices))
        require(priced, "prices", self.prices, bound)
        if self.token_env is not None:
            bearer_token(self.token_env, "token_env")

    @property
    def completions_per_call(self) -> int:
        return 0 if self.compare else 1

    @property
    def concurrency(self) -> int:
        return max(1, self.max_concurrent // self.repeat)

    @property
    def call_timeout(self) -> float:
        """Seconds of a call, whose verdicts wait for each other where there are more than places."""
        return self.seconds * math.ceil(self.repeat / self.max_concurrent) + 5.0

    @property
    def endpoint(self) -> str:
        """The address of the requests."""
        address = self.url.rstrip("/")
        if address.endswith(PATH):
            return address
        return address + PATH

    def sends(self) -> str:
        right = ", its row's right answer" if self.show_answer else ""
        answers = "all answers of a group" if self.compare else "each answer"
        times = f", {self.repeat} times" if self.repeat > 1 else ""
        where = f"POST {self.endpoint}, model {self.model}{token_note(self.token_env)}"
        return f"the question{right} and {answers}{times} → {where}"

    def keep_in(self, folder: Path) -> None:
        self._server.verdicts.keep_in(folder)

    def check(self) -> None:
        question, answer = TRIED
        made = self._asked(question, [answer], 0)

        def call() -> None:
            with suppress(UnusableError):  # the trial of the rewards tells
                asyncio.run(self._ask(made, 0))

        require_reachable(call, "the judge")

    def notes(self) -> list[str]:
        if self.grammar == "auto" and self._server.grammar == "none":
            what = "takes no response_format: a verdict counts only if it is the JSON object alone"
            return [f"{self.label}: {self.endpoint} {what}"]
        return []

    @cached_property
    def _server(self) -> "_Server":
        return _Server()

    # ---- a group -----------------------------------------------------------------------------------------------------

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        question = JudgedQuestion(_text_of(prompt.messages), self._right_answer(prompt))
        texts = [self._answer(completion) for completion in completions]
        distinct = sorted({text for text in texts if text.strip()})
        if self.compare and distinct:
            sets = [distinct]
        else:
            sets = [[text] for text in distinct]
        judged = asyncio.run(self._judged(question, sets))
        nothing = self._score([0.0], [], 1)
        return [judged.get(text, nothing) for text in texts]

    def _right_answer(self, prompt: Prompt) -> str | None:
        if not self.show_answer or prompt.answer is None:
            return None
        answers = prompt.answer if isinstance(prompt.answer, list) else [prompt.answer]
        texts = [answer if isinstance(answer, str) else dumps(answer) for answer in answers]
        return "\nor\n".join(texts)

    def _answer(self, completion: Completion) -> str:
        if not self.transcript or completion.episode is None:
            return completion.text
        return _text_of(messages_of(completion))

    async def _judged(self, question: JudgedQuestion, sets: Sequence[Sequence[str]]) -> dict[str, Score]:
        """The scores of the answers, by their texts."""
        scores: dict[str, Score] = {}
        places = asyncio.Semaphore(self.max_concurrent)

        async def verdict(made: Asked, number: int) -> GivenVerdict:
            async with places:
                return await self._server.verdicts.get(self._digest(made, number), lambda: self._ask(made, number))

        for answers in sets:
            requests = [self._asked(question, answers, number) for number in range(self.repeat)]
            given = await asyncio.gather(*(verdict(made, number) for number, made in enumerate(requests)))
            values: dict[str, list[float]] = {text: [] for text in answers}
            for made, one in zip(requests, given, strict=True):
                for place, number in zip(made.order, one.numbers, strict=True):
                    values[answers[place]].append(number / self.scale)
            for text in answers:
                scores[text] = self._score(values[text], given, len(answers))
        return scores

    def _score(self, values: Sequence[float], given: Sequence[GivenVerdict], answers: int) -> Score:
        value = fmean(values)
        parts: dict[str, float] = {}
        if given:
            parts = {
                "seconds": sum(each.seconds for each in given) / answers,
                "retries": sum(each.attempts - 1 for each in given) / answers,
            }
            if self.repeat > 1:
                parts["disagreement"] = pstdev(values)
            read = [each.read for each in given if each.read is not None]
            written = [each.written for each in given if each.written is not None]
            if len(read) == len(written) == len(given):
                parts["tokens"] = (sum(read) + sum(written)) / answers
                if self.prices is not None:
                    price = self.prices[0] * sum(read) + self.prices[1] * sum(written)
                    parts["price"] = price / MILLION / answers
        if self.correct_from is None:
            correct = None
        else:
            correct = value >= self.correct_from
        return Score(value=value, correct=correct, parts=parts)

    # ---- a verdict ---------------------------------------------------------------------------------------------------

    def _asked(self, question: JudgedQuestion, answers: Sequence[str], number: int) -> Asked:
        return asked(
            question,
            answers,
            criterion=self.rubric.strip(),
            scale=self.scale,
            characters=self.characters,
            compares=self.compare,
            seed=self.seed + number,
        )

    def _digest(self, made: Asked, number: int) -> str:
        """Names what was asked, for `Verdicts`: all that a verdict depends on, but for the grammar."""
        settings = [self.endpoint, self.model, self.temperature, self.seed + number, self.max_tokens, self.request]
        return sha256(json.dumps([*settings, made.messages], sort_keys=True, default=str).encode()).hexdigest()

    async def _ask(self, made: Asked, number: int) -> tuple[GivenVerdict, str]:
        """The verdict, and its reason.

        Raises:
            PostFailed: the server gives none. UnusableError: none can be read.
        """
        began = monotonic()
        known: str = self.grammar
        if known == "auto":
            known = self._server.grammar
        *others, last = ("json_schema", "none") if known == "auto" else (known,)
        for grammar in others:
            try:
                given = await self._attempted(made, number, grammar, began)
            except PostFailed as error:
                if error.status not in NO_GRAMMAR:
                    raise
            else:
                self._server.grammar = grammar
                return given
        given = await self._attempted(made, number, last, began)
        self._server.grammar = last
        return given

    async def _attempted(self, made: Asked, number: int, grammar: str, began: float) -> tuple[GivenVerdict, str]:
        attempts = 0
        token = ""
        if self.token_env is not None:
            token = bearer_token(self.token_env, "token_env")

        def body(attempt: int) -> bytes:
            nonlocal attempts
            attempts = attempt + 1
            fields: dict[str, Any] = {
                "model": self.model,
                "messages": made.messages,
                "temperature": self.temperature,
                "max_tokens": self.max_tokens,
                "seed": self.seed + number + 1000 * attempt,  # another draw, if a verdict could not be read
                "response_format": _format(grammar, made.schema),
                **(self.request or {}),
            }
            return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

        def read(data: bytes) -> tuple[Verdict, Mapping[str, Any]]:
            content, usage = _message(without(data, token.encode()))
            return read_verdict(without(content, token), len(made.order), self.scale, self.compare), usage

        left = max(0.0, self.seconds - (monotonic() - began))
        limits = PostLimits(seconds=left, retries=self.retries, backoff=self.backoff, deadline=left)
        verdict, usage = await post(self.endpoint, body, token=token, limit=RESPONSE_BYTES, attempts=limits, read=read)
        given = GivenVerdict(
            numbers=verdict.numbers,
            read=_count(usage.get("prompt_tokens")),
            written=_count(usage.get("completion_tokens")),
            seconds=monotonic() - began,
            attempts=attempts,
        )
        return given, verdict.reason


class _Server:
    """What is known of a judge's server, and what it has said."""

    def __init__(self) -> None:
        self.grammar = "auto"
        self.verdicts = Verdicts()


def _format(grammar: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    if grammar == "json_schema":
        return {"type": grammar, "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
    if grammar == "json_object":
        return {"type": grammar}
    return None


def _message(data: bytes) -> tuple[str, Mapping[str, Any]]:
    """The text of a chat completion, and its usage; UnusableError: it has none."""
    try:
        made = parse_json(data)
        choice = made["choices"][0]
        content = choice["message"]["content"]
    except (TooLargeError, UnreadableError, LookupError, TypeError):
        start = data[:80].decode(errors="replace")
        raise UnusableError(f"the response is no chat completion: {start!r}") from None
    if choice.get("finish_reason") == "length":
        raise UnusableError("the verdict was cut off at max_tokens")
    if not isinstance(content, str):
        raise UnusableError("the response has no text")
    usage = made.get("usage")
    if not isinstance(usage, dict):
        usage = {}
    return content, usage


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40:
        return value
    return None


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as one text, with their roles unless there is one alone."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
