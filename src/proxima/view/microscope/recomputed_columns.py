"""Columns of a completion that a run does not store, computed from its weights: `proxima view --recompute`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from proxima.data import UserError
from proxima.view.microscope.viewed_run import ViewedRun

ALTERNATIVES = 8  # the most probable tokens at each position


@dataclass(frozen=True, eq=False)
class RecomputedColumns:
    """Runs completions through the checkpoint before their step, which is the proximal policy, and through the model
    that the run began with, its reference. One model of each kind is kept in memory."""

    run: ViewedRun
    _models: dict[Path, Any] = field(default_factory=dict, repr=False)

    def __call__(self, step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Compute `proximal_log_prob` and `reference_log_prob` [T], nats, at the sampling temperature, and
        `alternatives`, ids and log-probs [T, ALTERNATIVES]; columns whose weights are missing are left out."""
        first, columns = Path(self.run.model), dict[str, Any]()
        before = first if step == 1 else self.run.files.checkpoint(step - 1) / "model"
        if not len(row["tokens"]):
            return columns
        for name, folder in (("proximal_log_prob", before), ("reference_log_prob", first)):
            if (folder / "config.json").is_file():
                log_probs = self._log_probs(folder, row)
                columns[name] = log_probs[np.arange(len(log_probs)), row["tokens"]]
                if name == "proximal_log_prob":
                    ids = np.argsort(-log_probs, axis=1, kind="stable")[:, :ALTERNATIVES]
                    columns["alternatives"] = ids, np.take_along_axis(log_probs, ids, 1)
        return columns

    def _log_probs(self, folder: Path, row: Mapping[str, Any]) -> Any:
        """Return the log-probs of all tokens, [T, V] nats, float32."""
        import torch
        from transformers import AutoModelForCausalLM

        if (row["prompt_tokens"] < 0).any():
            raise UserError("what was not stored is not recomputed where a prompt shows images")
        if folder not in self._models:
            for earlier in [path for path in self._models if path != Path(self.run.model)]:
                del self._models[earlier]
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        ids = torch.from_numpy(np.concatenate([row["prompt_tokens"], row["tokens"]]).astype(np.int64))
        with torch.inference_mode():
            logits = self._models[folder](ids[None]).logits[0, len(row["prompt_tokens"]) - 1 : -1].float()
            return (logits / (row["temperature"] or 1.0)).log_softmax(-1).numpy()


@lru_cache(maxsize=1)  # the weights of one run at a time
def recomputed_columns(run: ViewedRun) -> RecomputedColumns:
    """Return what computes a run's columns; it keeps the weights that it has loaded."""
    return RecomputedColumns(run)
