"""An example as a client sends it, and as a response to be packed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxima.data import UserError
from proxima.data.trajectory import Trajectory

Array = NDArray[Any]
COLUMNS = (  # inputs of losses: one value a target, or for [T, K] targets K of them
    "weights",
    "logprobs",
    "advantages",
    "mask",
    "clip_low_threshold",
    "clip_high_threshold",
    "proximal_logprobs",
    "reference_logprobs",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """An example: `tokens` [T] int32 are the model's input, and state t predicts `targets[t]`.

    targets: [T] int64, usually the tokens shifted by one; or [T, K], of which each has its own weight.
    columns: inputs of the loss by name, float32 of the shape of the targets.
    """

    tokens: Array
    targets: Array
    columns: dict[str, Array] = field(default_factory=dict)

    def check(self, place: str, first: "Datum", context: int, vocabulary: int) -> None:
        """Raise UserError if the example can't be run after the first of its request; `place` names it."""
        length = len(self.tokens)
        if not 0 < length <= context:
            raise UserError(f"{place}: {length} input tokens; must be 1 to {context}, the model's context")
        if self.targets.ndim not in (1, 2) or len(self.targets) != length or 0 in self.targets.shape:
            shape = list(self.targets.shape)[:9]
            raise UserError(f"{place}: target_tokens of shape {shape} for {length} input tokens")
        if self.targets.shape[1:] != first.targets.shape[1:]:
            shapes = f"{list(self.targets.shape)}, and example 0 {list(first.targets.shape)}"
            raise UserError(f"{place}: target_tokens of shape {shapes}; send them in requests of their own")
        for name, ids in (("model_input", self.tokens), ("target_tokens", self.targets)):
            if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
                raise UserError(f"{place}: {name} has an id outside 0 … {vocabulary - 1}")
        for name, values in self.columns.items():
            if name not in COLUMNS:
                known = f"known are target_tokens, {', '.join(COLUMNS)}"
                raise UserError(f"{place}: loss_fn_inputs has {name:.40}; {known}")
            if values.shape != self.targets.shape:
                shapes = f"{list(values.shape)[:9]}, target_tokens {list(self.targets.shape)}"
                raise UserError(f"{place}: {name} has shape {shapes}")
            if not np.isfinite(values).all():
                raise UserError(f"{place}: {name} is not finite everywhere")


def trajectories(data: Sequence[Datum]) -> list[Trajectory]:
    """The examples as responses to their first token. Neighbours of one group run their common beginning once, such as
    the prompt of several completions."""
    out: list[Trajectory] = []
    for datum in data:
        first = datum.tokens[:1]
        same = bool(out) and np.array_equal(out[-1].prompt_tokens, first)
        if datum.targets.ndim == 1:
            last = datum.targets[-1:]
        else:
            last = datum.targets[-1:, 0]
        tokens = np.concatenate([datum.tokens[1:], last]).astype(np.int32)
        group = 0
        if out:
            group = out[-1].group + (not same)
        sampled = np.ones(len(tokens), bool)
        out.append(Trajectory(group=group, prompt_tokens=first, tokens=tokens, sampled=sampled))
    return out


def column(data: Sequence[Datum], name: str, device: torch.device) -> Tensor | None:
    """A column of all examples, joined; None if none has it.

    Raises:
        UserError: only some have it.
    """
    have = [name in datum.columns for datum in data]
    if not any(have):
        return None
    if not all(have):
        raise UserError(f"example {have.index(False)}: {name} is missing, and others have it")
    return torch.from_numpy(np.concatenate([datum.columns[name] for datum in data])).to(device)
