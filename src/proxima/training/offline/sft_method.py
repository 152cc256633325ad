"""Supervised fine-tuning on the offline loop."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from proxima.data import FieldError
from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.evaluation.ratios import ratio_of_sums
from proxima.model.chat import prompt_tokens
from proxima.model.chat_answer import shown_answer
from proxima.task.example_rows import ChatReader
from proxima.task.prompts import EVAL_UID, row_arguments
from proxima.task.protocol import Row
from proxima.training.objectives.protocol import loss_tokens
from proxima.training.objectives.sft_objective import SftObjective
from proxima.training.offline.method import OfflineMethod
from proxima.training.stack import TrainStack


class SftMethod(OfflineMethod[Trajectory]):
    """Maximises the likelihood of completions, or of all turns of the assistant; see `SftObjective`."""

    headline = "loss"

    @cached_property
    def reader(self) -> ChatReader:
        reader: ChatReader = self.settings.reader(self.tokenizer, self.context)
        return reader

    def item(self, row: Row, number: int) -> Trajectory:
        return self.reader.example(number, row)

    def objective(self) -> SftObjective:
        return SftObjective()

    def measure(self, stack: TrainStack, items: Sequence[Trajectory]) -> list[tuple[float, int]]:
        """Negative log-likelihood, nats, and number of tokens in the loss, for each example."""
        measured = []
        for item, log_prob in zip(items, stack.log_prob(items), strict=True):
            learnt = log_prob if item.loss_mask is None else log_prob[item.loss_mask]
            measured.append((-float(learnt.sum(dtype=np.float64)), loss_tokens(item)))
        return measured

    def summarise(self, measured: Sequence[tuple[float, int]]) -> dict[str, float]:
        nats, tokens = zip(*measured, strict=True)
        loss = ratio_of_sums(nats, tokens)
        return {
            **loss.figures("loss"),
            "perplexity": math.exp(loss.value) if loss.value < 700 else math.inf,
            "tokens/evaluated": sum(tokens),
        }

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """The messages before the last turn of each chat; that turn is the answer to compare with."""
        prompts = []
        for number, row in enumerate(rows):
            try:
                *chat, answer = self.reader.chat(row)
            except FieldError:
                continue
            tokens = prompt_tokens(chat, self.tokenizer, row_arguments(row, self.reader.arguments, self.tokenizer))
            if len(tokens) < self.context:
                uid = EVAL_UID + number
                prompts.append(Prompt(uid=uid, messages=tuple(chat), tokens=tokens, answer=shown_answer(answer)))
        return prompts
