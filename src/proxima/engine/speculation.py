"""Speculative decoding with n-gram drafts: several tokens of a completion in one step, identical to those without
drafts.

A draft is the text that followed an earlier occurrence of a completion's last tokens, in its own prompt or answer. One
forward pass runs the last token and its draft, and each position then draws its token with its own random number, as
without a draft (`data.random`); draft tokens are accepted as long as they equal the drawn ones. So the drafts determine
how many tokens a step yields, never which ones, and need no rejection sampling: on a CPU, where a row's bits do not
depend on others, a completion is bit-identical, log-probs included.

Source: prompt lookup decoding (Saxena 2023); arXiv 2211.17192 for drafts in general. Differs: the latter accepts a
draft by its probability and draws again where it rejects one; here the draw comes first.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from proxima.data import FinishReason
from proxima.data.columns import Ints
from proxima.engine.decoder import padded_rows
from proxima.engine.sampler import Sampled, sample_tokens
from proxima.engine.sampling_rows import SamplingRows
from proxima.engine.scheduler import RunningBatch, RunningRequest, Scheduler, mask_columns, sampled_columns
from proxima.engine.token_table import Lines

if TYPE_CHECKING:
    from proxima.engine.fast_decoder import FastDecoder
    from proxima.engine.general_decoder import GeneralDecoder

NGRAM = 3  # tokens that must have occurred before
CHEAP_ROWS = 16  # number of completions up to which more rows hardly take longer
LONGEST_PAUSE = 64  # most tokens without a draft after failed drafts


class NgramDrafter:
    """Drafts the continuation of one completion from its tokens, starting with its prompt.

    Drafts grow after each one that was right to its end, up to `most` tokens, and otherwise shrink to the part that was
    right; after one without a right token, drafting pauses for 1, 2, 4 … tokens.
    """

    def __init__(self, tokens: Iterable[int], most: int) -> None:
        self.most, self.length = most, 1
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the position after the latest occurrence of an n-gram
        self._unseen: list[int] = []  # the rest of the last draft
        self._right = self._failures = self._pause = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append the next token of the completion."""
        if self._unseen:
            self._compare(token)
        self._pause = max(0, self._pause - 1)
        self._after[tuple(self.tokens[-NGRAM:])] = len(self.tokens)
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
        """Draft at most `room` tokens that may follow."""
        self._right, self._unseen = 0, []
        length = min(room, self.length)
        place = None if self._pause else self._after.get(tuple(self.tokens[-NGRAM:]))
        if length < 1 or place is None:
            return ()
        drafted = self.tokens[place : place + length]
        period = len(self.tokens) - place
        drafted += [drafted[i % period] for i in range(len(drafted), length)]  # repeats a periodic text
        self._unseen = list(drafted)
        return drafted


class SpeculativeScheduler(Scheduler):
    """A scheduler whose steps verify drafts. A step without drafts is a plain one.

    Args:
        most: most tokens of a draft.
        settings: settings of the scheduler.

    `steps`: how often a completion was advanced; `drafted`: number of draft tokens; `accepted`: those that saved a
    step.
    """

    decoder: "FastDecoder | GeneralDecoder"

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
        if self._worth_verifying(sum(map(len, drafts))):
            self._verify(drafts)
        else:
            super()._decode()

    def _worth_verifying(self, drafted: int) -> bool:
        """Return True if verifying drafts pays off. Rows that replace padding are free, and a few more cost little,
        because a step reads all weights anyway. Many rows cost more, which pays off only if requests are waiting for
        completions to end sooner."""
        count = len(self.running)
        enough = count + drafted <= padded_rows(count) or drafted > count // 4
        return drafted > 0 and enough and (count <= CHEAP_ROWS or bool(self.waiting))

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
        """Run the last tokens and drafts together, draw from all rows, and keep the draws that follow right draft
        tokens."""
        self._write()
        slots, lines = np.arange(len(drafts)), np.array([running.line for running in self.running])
        sizes = np.array([len(draft) for draft in drafts])
        begin = np.append(0, sizes.cumsum())  # of each slot's draft, among all drafted tokens
        self.drafted += int(begin[-1])
        slot = np.append(slots, slots.repeat(sizes))  # of each row
        place = np.append(0 * slots, np.arange(begin[-1]) - begin[:-1].repeat(sizes) + 1)
        at = self.table.length[lines][slot] + place
        last = self.table.columns["tokens"][lines, self.table.length[lines] - 1]
        tokens = np.concatenate([last, *(draft for draft in drafts if draft)]).astype(np.int64)
        sampled, columns = self._drawn(tokens, self.table.prompt_length[lines][slot] + at - 1, begin, slot, at)
        drawn, rows = columns["tokens"][0].tolist(), slots
        ids = None if self.table.masks is None else mask_rows(sampled)
        finished: list[tuple[RunningRequest, FinishReason]] = []
        for after in count(1):
            requests, draws = [self.running[i] for i in slot[rows]], [drawn[row] for row in rows]
            self._append(lines[slot[rows]], {name: column[:, rows] for name, column in columns.items()})
            if ids is not None and self.table.masks is not None:
                parts = [ids[row] for row in rows]
                counts = np.array([[len(part) for part in parts]])
                self.table.masks.append(lines[slot[rows]], np.concatenate(parts), counts)
            self.generated_tokens += len(draws)
            self._follow(requests, draws)
            finished += (ended := self._ended(requests, draws))
            over = {running for running, _ in ended}
            going = [
                i
                for i, running, token in zip(slot[rows], requests, draws, strict=True)
                if running not in over and [token] == [*drafts[i][after - 1 : after]]
            ]
            self.accepted += len(going)
            if not going:
                break
            rows = len(slots) + begin[going] + after - 1
        order = {running: i for i, running in enumerate(self.running)}
        self._finish(sorted(finished, key=lambda pair: order[pair[0]]))

    def _drawn(
        self, tokens: Lines, position: Lines, begin: Lines, slot: Lines, at: Lines
    ) -> tuple[Sampled, dict[str, np.ndarray]]:
        """The draw of each row after its token, as `Sampled` and as columns of the table [1, rows]."""
        device, count = self.cache.device, len(tokens)
        padding = padded_rows(count) - count
        rows = [torch.from_numpy(np.append(each, each[:1].repeat(padding))).to(device) for each in (tokens, position)]
        longest, drafts = int(position.max()) + 1, torch.from_numpy(begin).to(device)
        hidden = self.decoder.step(rows[0], rows[1], self.cache, longest, drafts)
        routes = self.decoder.routes
        settings = SamplingRows.of([running.request.sampling for running in self.running], device)
        uniform = self.table.uniform[[self.running[i].line for i in slot], at]
        sampled = sample_tokens(
            self.decoder.logits(hidden[:count]),
            settings.of_rows(torch.from_numpy(slot).to(device)),
            torch.from_numpy(uniform).to(device),
            self.top_k,
            masks=self.table.masks is not None,
        )
        columns = sampled_columns([sampled])
        if routes is not None:
            columns["routed_experts"] = routes[None, :count].cpu().numpy()
        return sampled, columns


def mask_rows(sampled: Sampled) -> list[Ints]:
    """The tokens that could have been drawn, by row."""
    ids, counts = mask_columns([sampled])
    return np.split(ids, counts[0].cumsum()[:-1])
