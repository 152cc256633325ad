"""Reward models on the offline loop."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from proxima.config.sections.reward_model_section import RewardModelConfig
from proxima.core import RewardLoss
from proxima.data import PreferencePair
from proxima.evaluate.pair_metrics import ScoredPair, pair_metrics
from proxima.model import LoadedModel, PackedModel, ScalarModel, load_scalar_model
from proxima.model.load import DTYPES
from proxima.model.scalar_model import pad_token, scalar_config, set_score_normalization
from proxima.runtime.launch.models import packed_settings
from proxima.task.protocol import Row
from proxima.train import TrainStack
from proxima.train.objectives import RewardObjective
from proxima.train.offline.method import OfflineMethod


class RewardMethod(OfflineMethod[RewardModelConfig, PreferencePair]):
    """The better completion of a pair should score higher; see `RewardObjective`.

    An evaluation leaves mean and standard deviation of the held-out scores in the model's config, where the reward
    `model` finds them (`normalize`).
    """

    headline = "accuracy"
    marks_model = True

    def __init__(self, config: RewardModelConfig, tokenizer: Any, context: int) -> None:
        super().__init__(config, tokenizer, context)
        scalar_config(config.model.path, config.model.revision, new_head=True)  # before rows are read
        self.pad: int | None = None

    def item(self, row: Row, number: int) -> PreferencePair:
        return self.config.pair(number, row, self.tokenizer, self.context)

    def load(self, path: str | None) -> LoadedModel:
        model, seed, spread = self.config.model, self.config.seed, self.config.reward_model.head_std
        place: dict[str, Any] = {"dtype": DTYPES[model.dtype], "device": model.device, "seed": seed}
        if path is not None and model.lora is None:
            return load_scalar_model(path, **place)
        lora = model.lora if model.lora is None or path is None else replace(model.lora, path=path)
        return load_scalar_model(model.path, revision=model.revision, new_head=spread, lora=lora, **place)

    def model(self, loaded: LoadedModel) -> PackedModel:
        self.pad = pad_token(loaded.model.config)
        return ScalarModel(loaded, **packed_settings(self.config.model))

    def objective(self) -> RewardObjective:
        section = self.config.reward_model
        return RewardObjective(loss=RewardLoss(center=section.center), margin=section.margin, pad=self.pad)

    def measure(self, stack: TrainStack, items: Sequence[PreferencePair]) -> list[ScoredPair]:
        assert isinstance(stack.model, ScalarModel)
        self.scored = stack.model
        sides = [side for pair in items for side in (pair.chosen, pair.rejected)]
        scores = stack.model.scores(sides, stack.tokens_per_micro_batch).reshape(-1, 2)
        return [
            ScoredPair(
                question=_question(pair),
                chosen=float(chosen),
                rejected=float(rejected),
                chosen_length=len(pair.chosen.tokens),
                rejected_length=len(pair.rejected.tokens),
            )
            for pair, (chosen, rejected) in zip(items, scores, strict=True)
        ]

    def summarise(self, measured: Sequence[ScoredPair]) -> dict[str, float]:
        found = pair_metrics(measured, seed=self.config.seed)
        if found["score/std"] > 0:
            set_score_normalization(self.scored.model.config, found["score/mean"], found["score/std"])
        return found


def _question(pair: PreferencePair) -> int:
    """The same number for pairs with the same prompt."""
    prompt = np.ascontiguousarray(pair.chosen.prompt_tokens)
    return int.from_bytes(blake2b(prompt.tobytes(), digest_size=7).digest(), "big")
