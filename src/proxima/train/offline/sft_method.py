"""Supervised fine-tuning on the offline loop."""

import math
from collections.abc import Sequence

import numpy as np

from proxima.config.sections.sft_section import SftConfig
from proxima.data import FieldError, Message, Prompt, Trajectory
from proxima.evaluate.intervals import ratio_of_sums
from proxima.model import LoadedModel
from proxima.model.chat import completion_tokens, prompt_tokens
from proxima.runtime.launch.run_data import EVAL_UID
from proxima.task.protocol import Row
from proxima.train import TrainStack
from proxima.train.objectives import SftObjective
from proxima.train.objectives.sft_objective import loss_tokens
from proxima.train.offline.method import OfflineMethod


class SftMethod(OfflineMethod[SftConfig, Trajectory]):
    """The likelihood of completions, or of all turns of the assistant; see `SftObjective`."""

    headline = "loss"

    def item(self, row: Row, number: int) -> Trajectory:
        return self.config.reader(self.tokenizer, self.context).example(number, row)

    def notes(self, loaded: LoadedModel) -> list[str]:
        """Of a base model with the chat template of another: engines stop at its EOS, and turns end with another."""
        chat: Message = {"role": "user", "content": "Hello"}
        end = int(completion_tokens([chat], "Hello", self.tokenizer, self.config.data.template_arguments)[-1])
        if end in loaded.stop_tokens:
            return []
        shown = self.tokenizer.convert_ids_to_tokens([end, *loaded.stop_tokens])
        what = f"the model learns to end its turns with {shown[0]}, and engines stop at {', '.join(shown[1:])}"
        return [f"{what}; set eos_token_id in its generation_config.json to {end}"]

    def objective(self) -> SftObjective:
        return SftObjective()

    def measure(self, stack: TrainStack, items: Sequence[Trajectory]) -> list[tuple[float, int]]:
        """Negative log-likelihood, nats, and tokens in the loss of each example."""
        found = []
        for item, log_prob in zip(items, stack.log_prob(items), strict=True):
            learnt = log_prob if item.loss_mask is None else log_prob[item.loss_mask]
            found.append((-float(learnt.sum(dtype=np.float64)), loss_tokens(item)))
        return found

    def summarise(self, measured: Sequence[tuple[float, int]]) -> dict[str, float]:
        nats, tokens = zip(*measured, strict=True)
        loss = ratio_of_sums(nats, tokens)
        return {
            **loss.figures("loss"),
            "perplexity": math.exp(loss.value) if loss.value < 700 else math.inf,
            "tokens/evaluated": sum(tokens),
        }

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """What comes before the last turn of each chat; the turn is the answer to compare with."""
        reader, found = self.config.reader(self.tokenizer, self.context), list[Prompt]()
        for number, row in enumerate(rows):
            try:
                *chat, answer = reader.chat(row)
            except FieldError:
                continue
            tokens = prompt_tokens(chat, self.tokenizer, self.config.data.template_arguments)
            if len(tokens) < self.context:
                uid = EVAL_UID + number
                found.append(Prompt(uid=uid, messages=tuple(chat), tokens=tokens, answer=answer["content"]))
        return found
