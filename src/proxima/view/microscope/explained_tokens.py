"""The decisions about the tokens of a completion, as columns and in words. Imports torch: the server imports it while
its page already answers, the others when they open a completion."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from proxima.core.token_reasons import TokenReasons
from proxima.experiments.stored_tokens import LossSpecs, StoredTokens
from proxima.view.microscope.recomputed_columns import recomputed_columns
from proxima.view.microscope.viewed_run import ViewedRun


@dataclass(frozen=True, eq=False)
class ExplainedTokens:
    """Args: reasons: None: `stored.problem()` says why there are none. alternatives: recomputed ids and log-probs
    [T, K]."""

    stored: StoredTokens
    reasons: TokenReasons | None
    alternatives: tuple[NDArray[Any], NDArray[Any]] | None

    @classmethod
    def of(cls, run: ViewedRun, step: int, row: Mapping[str, Any]) -> "ExplainedTokens":
        """Explain a completion of a step."""
        recomputed = recomputed_columns(run)(step, row) if run.recompute else {}
        alternatives = recomputed.pop("alternatives", None)
        stored = StoredTokens(row=row, specs=LossSpecs.of(run.recipe), step=step, recomputed=recomputed)
        return cls(stored, stored.reasons(), alternatives)

    @cached_property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns that derive from the row, [T] each."""
        columns = dict(self.stored.recomputed)
        if (proximal := self.stored.proximal_log_prob) is not None:
            columns["proximal_log_prob"] = proximal.numpy()
        if self.reasons is not None:
            columns["loss_weight"] = self.reasons.weight.numpy()
        if self.reasons is not None and self.reasons.band is not None:
            columns |= {name: values.detach().numpy() for name, values in self.reasons.band.drawn().items()}
        return columns

    @property
    def band(self) -> dict[str, Any] | None:
        """The surrogate's description of its own columns."""
        if self.reasons is None or self.reasons.band is None:
            return None
        band = self.reasons.band
        return {"title": band.title, "names": [*band.drawn()], "note": band.note}

    def reason(self, token: int) -> str:
        """Explain one token in words, or say why its reason is unknown."""
        return self.stored.problem() if self.reasons is None else str(self.reasons.reason(token))
