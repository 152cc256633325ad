"""Speculative decoding with n-gram drafts: several tokens of a completion in one step, the same ones as without.

A draft is what followed when the last tokens of a completion occurred before, in its own prompt or answer. One forward
runs the last token and its draft, and each position then draws its token with its own random number, as without a draft
(`data.random`); the tokens of the draft count as long as they are those that were drawn. So the drafts decide how many
tokens a step gives, never which ones, and need no rejection sampling: where a row's bits do not depend on others, on a
CPU, a completion is the same to the bit, log-probs included.

Source: prompt lookup decoding (Saxena 2023); verification as in arXiv 2211.17192, with drafts that are certain. Differs:
that draws anew where a draft is rejected; here the draw comes first.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.engine.decoder import CachingDecoder, padded_rows
from proxima.data import FinishReason
from proxima.engine.scheduler import RunningBatch, RunningRequest, Scheduler

SIZES = (4, 3)  # of the n-grams that are looked up, the longer first
LONGEST_PAUSE = 64  # tokens without a draft after drafts that failed


class NgramDrafter:
    """The tokens of one completion, its prompt first, and what may follow them.

    Drafts become longer with each that is right to its end, up to `most` tokens, and as short as what was right of
    them; after one without a right token there is none for 1, 2, 4 … tokens.
    """

    def __init__(self, tokens: Iterable[int], most: int) -> None:
        self.most, self.length = most, 1
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the latest occurrence of an n-gram ends
        self._unseen: list[int] = []  # what is left of the last draft
        self._right = self._failures = self._pause = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The next token of the completion."""
        if self._unseen:
            self._compare(token)
        self._pause = max(0, self._pause - 1)
        for size in SIZES:
            self._after[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def _compare(self, token: int) -> None:
        if token == self._unseen.pop(0):
            self._right += 1
            if self._unseen:
                return
            self.length, self._failures = min(self.most, 2 * self._right), 0
            return
        self._unseen.clear()
        self.length = max(1, self._right)
        self._failures = 0 if self._right else self._failures + 1
        if self._failures:
            self._pause = min(LONGEST_PAUSE, 1 << self._failures)

    def draft(self, room: int) -> Sequence[int]:
        """At most `room` tokens that may follow."""
        self._right, self._unseen = 0, []
        length = min(room, self.length)
        place = None if self._pause else self._place()
        if length < 1 or place is None:
            return ()
        found = self.tokens[place : place + length]
        period = len(self.tokens) - place
        found += [found[i % period] for i in range(len(found), length)]  # a text that repeats itself goes on so
        self._unseen = list(found)
        return found

    def _place(self) -> int | None:
        places = (self._after.get(tuple(self.tokens[-size:])) for size in SIZES)
        return next((place for place in places if place is not None), None)


class SpeculativeScheduler(Scheduler):
    """A scheduler whose steps verify drafts. A step without any is a plain one.

    Args:
        most: tokens of a draft.
        settings: of the scheduler.

    `steps`: how often a completion was advanced; `drafted`: tokens of drafts; `accepted`: those of them that saved a
    step.
    """

    decoder: CachingDecoder

    def __init__(self, *args: Any, most: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.most = most
        self.steps = self.drafted = self.accepted = 0
        self._drafters: WeakKeyDictionary[RunningRequest, NgramDrafter] = WeakKeyDictionary()

    @property
    def detail(self) -> dict[str, Any]:
        return {"speculation": {name: getattr(self, name) for name in ("steps", "drafted", "accepted")}}

    def _decode(self) -> None:
        unwritten = 0 if self._batch is None else len(self._batch.sampled)
        drafts = [self._draft(running, unwritten) for running in self.running]
        self.steps += len(drafts)
        if any(drafts):
            self._verify(drafts)
        else:
            super()._decode()

    def _draft(self, running: RunningRequest, unwritten: int) -> Sequence[int]:
        room = self.table.limit[running.line] - self.table.length[running.line] - unwritten - 1
        return self._drafters[running].draft(int(room))

    def _sample(self, logits: Tensor, batch: RunningBatch) -> list[int]:
        tokens = super()._sample(logits, batch)
        self._follow(batch.requests, tokens)
        return tokens

    def _follow(self, requests: Sequence[RunningRequest], tokens: Sequence[int]) -> None:
        for running, token in zip(requests, tokens, strict=True):
            if running not in self._drafters:
                self._drafters[running] = NgramDrafter(running.request.prompt.tokens.tolist(), self.most)
            self._drafters[running].append(token)

    def _verify(self, drafts: Sequence[Sequence[int]]) -> None:
        """Run every completion's last token and its draft at once, then draw from them place by place."""
        self._write()
        logits, routes, first = self._run(drafts)
        going = list(zip(self.running, drafts, first, strict=False))
        finished: list[tuple[RunningRequest, FinishReason]] = []
        for place in count():
            requests = [running for running, *_ in going]
            rows = torch.tensor([row + place for *_, row in going], device=logits.device)
            batch = self._batch = RunningBatch.of(requests, self.table, logits.device)
            if routes is not None:
                batch.routes.append(routes[rows])
            tokens = batch.draw(logits[rows], self.top_k, self.table.masks is not None)
            self.generated_tokens += len(tokens)
            self._write()
            self._follow(requests, tokens)
            finished += (ended := self._ended(requests, tokens))
            over = {running for running, _ in ended}
            right = [
                list(draft[place : place + 1]) == [token] for (_, draft, _), token in zip(going, tokens, strict=True)
            ]
            going = [each for each, is_right in zip(going, right, strict=True) if is_right and each[0] not in over]
            self.accepted += len(going)
            if not going:
                break
        slots = {running: slot for slot, running in enumerate(self.running)}
        self._finish(sorted(finished, key=lambda pair: slots[pair[0]]))

    def _run(self, drafts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None, list[int]]:
        """Logits and routes of each completion's last token and of its draft, and where the rows of each begin."""
        device, sizes = self.cache.device, np.array([1 + len(draft) for draft in drafts])
        first = [0, *accumulate(sizes.tolist())]
        self.drafted += first[-1] - len(drafts)
        ends = np.array([self._length(running) for running in self.running])
        last = [int(self.table.tokens(running.line)[-1]) for running in self.running]
        tokens = torch.tensor([t for token, draft in zip(last, drafts, strict=True) for t in (token, *draft)])
        position = torch.from_numpy(np.repeat(ends - 1 - np.array(first[:-1]), sizes) + np.arange(first[-1]))
        padding = (0, padded_rows(first[-1]) - first[-1])
        rows = [F.pad(column, padding, value=int(column[-1])).to(device) for column in (tokens, position)]
        hidden = self.decoder.step(*rows, self.cache, torch.tensor(first, device=device))
        return self.decoder.logits(hidden[: first[-1]]), self.decoder.routes, first
