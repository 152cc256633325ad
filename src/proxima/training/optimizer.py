"""Optimizers and learning-rate schedules."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from proxima.data import require
from proxima.training.optimizer_step import WeightwiseOptimizer


@dataclass(frozen=True)
class Adam:
    """The base of all kinds of Adam; vectors (norms, biases) are not decayed.

    Args:
        lr: peak learning rate, >= 0; 0 leaves the weights unchanged, to measure only the mismatch. The default is 2e-5
            in a recipe of SFT, 1e-5 in one of a reward model.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: >= 0, a share of the weight times the learning rate each update.

    Source: arXiv 1711.05101.
    """

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr", self.lr, "must be >= 0 and finite")
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "must be in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "must be in [0, 1)")
        require(0 < self.eps < math.inf, "eps", self.eps, "must be > 0 and finite")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "must be >= 0 and finite")

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups for torch's optimizers: matrices before vectors, and those of each device mesh by
        themselves, as a fused step needs."""
        split = dict[tuple[bool, Any], list[nn.Parameter]]()
        for parameter in parameters:
            if parameter.requires_grad:
                vector, mesh = parameter.dim() < 2, getattr(parameter, "device_mesh", None)
                split.setdefault((vector, mesh), []).append(parameter)
        groups = sorted(split.items(), key=lambda group: group[0][0])
        return [{"params": own, "weight_decay": 0.0 if vector else self.weight_decay} for (vector, _), own in groups]

    def moments(self, matrices: int, others: int) -> tuple[int, int]:
        """Bytes of Muon's momentum, and of Adam's moments, for these numbers of weights in matrices of layers and
        others."""
        return 0, 8 * (matrices + others)

    def settings(self) -> dict[str, Any]:
        """Arguments of torch's AdamW and similar optimizers."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, fused; vectors (norms, biases) are not decayed.

    Args:
        offload: the moments stay in host memory, and are copied to the device for a weight's step: 8 bytes per weight
            less there, 16 more transferred in each update. The weights are bit-identical.

    Source: arXiv 1711.05101.
    """

    offload: bool = False

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, in their order."""
        if self.offload:
            return WeightwiseOptimizer(self.groups(parameters), self.settings(), on_host=True)
        return torch.optim.AdamW(self.groups(parameters), **self.settings(), fused=True)


@dataclass(frozen=True)
class Schedule:
    """The share of the peak learning rate at each update of a run: W updates of warm-up, N in all.

        update i < W: (i + 1) / W      then, with p = (i - W) / (N - W):
        constant: 1      linear: f + (1 - f) (1 - p)      cosine: f + (1 - f) (1 + cos(pi p)) / 2

    So f would be reached by the update after the last one, and no update has a learning rate of 0 unless the peak is 0.

    Args:
        kind: `constant`; `linear` or `cosine` fall from the end of the warm-up.
        total_updates: N, of the whole run.
        warmup: W, updates of linear rise.
        final_ratio: f, the share of the peak that they fall towards; `constant` does not read it.
    Source: `get_scheduler` of transformers: linear, cosine, cosine_with_min_lr, constant_with_warmup.
    Differs: its warm-up has i / W, so that its first update changes nothing.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int = 1
    warmup: int = 0
    final_ratio: float = 0.0

    def factor(self, update: int) -> float:
        """The share at an update, counted from 0; after the last update, the final one."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (update - self.warmup) / max(1, self.total_updates - self.warmup))
        shape = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_ratio + (1 - self.final_ratio) * shape
