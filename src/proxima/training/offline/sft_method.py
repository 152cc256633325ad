"""Supervised fine-tuning on the offline loop, and its objective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.data import FieldError
from proxima.data.flow import EVAL_UID, Prompt
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import ChatExample, Trajectory, paths_of, trained_tokens
from proxima.evaluation.intervals import ratio_of_sums
from proxima.model.chat.answer import shown_answer
from proxima.model.chat.written_text import prompt_and_beginning
from proxima.model.packed_model import TokenOutputs
from proxima.task.example_rows import ChatReader
from proxima.task.prompts import row_arguments
from proxima.task.protocol import Row
from proxima.training.objectives.protocol import Objective
from proxima.training.offline.method import OfflineMethod, trained_sum
from proxima.training.stack import TrainStack


@dataclass(frozen=True, kw_only=True)
class SftObjective(Objective[Trajectory | ChatExample]):
    """Negative log-likelihood of the tokens in the loss mask, the mean over all of them in an update.

        loss = Σ_i Σ_{t in mask_i} -log π(y_t | x_i, y_<t) / Σ_i |mask_i|        nats per token

    The denominator is that of the whole update, before it is split into micro-batches: a token counts the same in a
    long example and in a short one, and no packing or split changes the gradient.

    Differs: TRL's SFTTrainer divides by the same count with transformers 4.46 and later; before, it averaged the means
        of the micro-batches.
    """

    def sequences(self, item: Trajectory | ChatExample) -> Sequence[Trajectory]:
        return paths_of(item)

    def denominators(self, items: Sequence[Trajectory | ChatExample], statistics: Any = None) -> list[Tensor]:
        return [torch.tensor(sum(map(trained_tokens, items)), dtype=torch.float64)]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        learnt = torch.nonzero_static(batch.loss_mask, size=sum(batch.in_loss_of)).flatten()  # waits for no device
        nll = -outputs.need("log_prob").double()[learnt]
        return [Loss(nll.sum(), batch.loss_mask.sum().double(), {})]


class SftMethod(OfflineMethod[Trajectory | ChatExample]):
    """Maximises the likelihood of completions, or of all turns of the assistant; see `SftObjective`."""

    headline = "loss"

    @cached_property
    def reader(self) -> ChatReader:
        reader: ChatReader = self.settings.reader(self.tokenizer, self.context)
        return reader

    def item(self, row: Row, number: int) -> Trajectory | ChatExample:
        paths = self.reader.paths(number, row)
        if len(paths) == 1:
            return paths[0]
        return ChatExample(row=number, paths=paths)

    def objective(self) -> SftObjective:
        return SftObjective()

    def measure(self, stack: TrainStack, items: Sequence[Trajectory | ChatExample]) -> list[tuple[float, int]]:
        """Negative log-likelihood, nats, and number of tokens in the loss, for each example."""
        every_path = chain.from_iterable(map(paths_of, items))
        log_probs = iter(stack.log_prob(list(every_path)))
        measured = []
        for item in items:
            paths = paths_of(item)
            nats = -trained_sum(paths, list(islice(log_probs, len(paths))))
            measured.append((nats, trained_tokens(item)))
        return measured

    def summarise(self, measured: Sequence[tuple[float, int]]) -> dict[str, float]:
        nats, tokens = zip(*measured, strict=True)
        loss = ratio_of_sums(nats, tokens)
        perplexity = math.exp(loss.value) if loss.value < 700 else math.inf
        return {**loss.figures("loss"), "perplexity": perplexity, "tokens/evaluated": sum(tokens)}

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """The messages before the last turn of each chat; that turn is the answer shown for comparison."""
        prompts = []
        for number, row in enumerate(rows):
            try:
                *chat, answer = self.reader.chat(row)
            except FieldError:
                continue
            arguments = row_arguments(row, self.reader.arguments, self.tokenizer)
            tokens, begun = prompt_and_beginning(chat, self.tokenizer, arguments)
            if len(tokens) < self.context:
                uid = EVAL_UID + number
                shown = shown_answer(answer)
                prompts.append(Prompt(uid=uid, messages=tuple(chat), tokens=tokens, begun=begun, answer=shown))
        return prompts
