"""A completion down to its tokens: stored, derived and recomputed columns, and the explanation of a token."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.core.token_reasons import TokenReasons
from proxima.data import UserError
from proxima.data.columns import TOKEN_COLUMNS
from proxima.data.errors import counted
from proxima.data.flow import Key
from proxima.data.image_tokens import shown_images
from proxima.data.json_reader import load_json
from proxima.experiments.stored_tokens import LossSpecs, StoredTokens
from proxima.view.microscope.single_file import thumbnails
from proxima.view.microscope.step_file import StepFile, short_episode
from proxima.view.microscope.viewed_run import ViewedRun

FACTS = (
    "reward",
    "parts",
    "advantage",
    "outcome",
    "finish_reason",
    "temperature",
    "text",
    "question",
    "answer",
    "error",
    "correct",
    "used",
)
COLUMNS = {column.name: (column.unit, column.meaning) for column in TOKEN_COLUMNS.values() if column.shown} | {
    "advantage": ("reward units", "of the token"),
    "log_ratio": ("nats", "log π - log μ"),
    "mismatch": ("nats", "|log π - log μ| of trainer and engine under the same weights, those of the step's beginning"),
    "divergence": ("probability", "|π - μ|"),
}  # name: unit and description
DERIVED = {
    "proximal_log_prob": ("nats", "the proximal policy, the centre of the trust region"),
    "reference_log_prob": ("nats", "the model that the run began with, recomputed"),
    "loss_weight": ("", "gradient of the token relative to the policy gradient, before aggregation; 0: masked"),
}
PATH_SPAN = ("role", "tokens", "sampled", "turn", "calls", "unreadable", "error", "reward")  # of another path's spans
POLICIES = {
    "current": "log_prob",
    "behavior": "behavior_log_prob",
    "proximal": "proximal_log_prob",
    "reference": "reference_log_prob",
    "sampled": "sampled_log_prob",
    "next": "next_log_prob",
}
MISSING = {
    "current": "the trainer ran no forward pass of the completion",
    "proximal": "not stored; --recompute computes it from the checkpoint of the step before",
    "reference": "not stored; --recompute computes it from the model that the run began with",
}


@dataclass(frozen=True, eq=False)
class CompletionPage:
    """A completion of a step, read once; derived values are computed on demand."""

    run: ViewedRun
    file: StepFile
    key: Key

    @cached_property
    def row(self) -> dict[str, Any]:
        (row,) = self.file.read([self.file.row_of(self.key)])
        return row

    @cached_property
    def explained(self) -> "ExplainedTokens":
        return ExplainedTokens.of(self.run, self.file.step, self.row)

    @cached_property
    def columns(self) -> dict[str, NDArray[Any] | None]:
        """The stored columns and those derived by the algorithm, [T] each. Tokens that the model did not write have no
        behavior policy, no advantage and no place in the trust region: NaN."""
        columns = dict.fromkeys(DERIVED) | stored_columns(self.row) | dict(self.explained.columns)
        columns["mismatch"] = self.mismatch[0]
        sampled = self.row.get("sampled")
        if sampled is None or sampled.all():
            return columns
        absent = {name for name, values in columns.items() if values is not None and values.dtype.kind == "f"}
        absent -= {"log_prob", "entropy"}
        return columns | {name: np.where(sampled, columns[name], np.nan).astype(np.float32) for name in absent}

    @cached_property
    def mismatch(self) -> tuple[NDArray[Any] | None, str]:
        """[T] nats, |log π - log μ| of trainer and engine under the same weights, NaN for tokens of other weights; and
        why it is unknown. A forward pass after an update, or of older tokens, would measure how far the policy has
        moved too."""
        row = self.row
        version = self.run.version_before(self.file.step)
        first = row.get("log_prob")
        behavior = row.get("behavior_log_prob")
        if self.run.algorithm.get("proximal") in ("recompute", "next") and row.get("proximal_log_prob") is not None:
            first = row["proximal_log_prob"]  # of a pass before the step's updates
        elif first is not None and self.updates_before != 0:
            moved = self.updates_before
            moves = "others" if moved is None else counted(moved, "update")
            return None, f"its first forward pass came after {moves} of the step, which had moved the weights"
        if first is None:
            return None, "not stored: the trainer ran no forward pass of it"
        if behavior is None:
            return None, "not stored: there is no μ"
        if self.run.recipe.get("rollouts"):
            return None, "this run is a replay: the weights of another run wrote the completion"
        fresh = np.ones(len(first), bool) if version is None else row["policy_version"] == version
        if len(fresh) and not fresh.any():
            return None, f"older weights wrote the completion: the step began with version {version}"
        return np.where(fresh, np.abs(first - behavior), np.nan).astype(np.float32), ""

    @property
    def updates_before(self) -> int | None:
        """Updates of the step before the trainer's first forward pass of the completion; None if there are several and
        the file does not say."""
        stored = self.row.get("updates_before")
        if stored is not None:
            return int(stored)
        train = self.run.recipe.get("train")
        settings = train if isinstance(train, dict) else {}
        if all((settings.get(f"{name}_per_step") or 1) == 1 for name in ("updates", "epochs")):
            return 0
        return None

    def answer(self) -> dict[str, Any]:
        """Return everything except the explanations of its tokens."""
        row = self.row
        band = self.explained.band
        if band is not None:
            band = {"kind": self.run.surrogate, **band}
        prompt = row["prompt_tokens"].tolist()
        tokens = row["tokens"].tolist()
        shown = thumbnails(self.run.files.path, shown_images([*prompt, *tokens]))
        uid, sample, turn = self.key
        return {
            "uid": uid,
            "sample": sample,
            "turn": turn,
            "prompt": {"ids": prompt, "text": self.run.text.each(prompt), "images": shown},
            "tokens": {"ids": tokens, "text": self.run.text.each(tokens)},
            **{name: row.get(name) for name in FACTS},
            "columns": {name: base64_column(values) for name, values in self.columns.items() if values is not None},
            "reasons_available": self.explained.reasons is not None,
            "problem": self.explained.stored.problem(),
            "band": band,
            "columns_doc": {name: {"unit": unit, "doc": doc} for name, (unit, doc) in (COLUMNS | DERIVED).items()},
            "episode": self._episode(),
            "versions": sorted(set(row["policy_version"].tolist())),
        }

    def _episode(self) -> dict[str, Any] | None:
        """Return the messages of this path, the episode's outcome, and where its other paths diverge from this one."""
        if self.row.get("episode") is None:
            return None
        episode = load_json(self.row["episode"])
        others = [row for key, row in self.file.rows.items() if key[:2] == self.key[:2] and key != self.key]
        if not others:
            return {**episode, "paths": []}
        paths = []
        for path in self.file.read(others, ("turn", "tokens", "episode")):
            shared = first_difference(self.row["tokens"], path["tokens"])["first_difference"]
            other = short_episode(path["episode"]) or {"spans": []}
            at = {"turn": path["turn"], "shared_tokens": min(shared or 0, len(self.row["tokens"]) - 1)}
            if other.get("player"):
                at["player"] = other["player"]
            at["spans"] = [{name: span[name] for name in PATH_SPAN} for span in other["spans"]]
            paths.append(at)
        return {**episode, "paths": paths}

    def token(self, token: int) -> dict[str, Any]:
        """Describe a token in figures and in words. Raises: UserError if there is no such token."""
        count = len(self.row["tokens"])
        if not 0 <= token < count:
            raise UserError(f"the completion has {count} tokens, 0 to {count - 1} in an address")
        at = self._values(token)
        log_probs = {name: at.get(column) for name, column in POLICIES.items()}
        ratio = at["log_ratio"]
        if ratio is not None:
            ratio = math.exp(min(ratio, 700.0))
        id = int(self.row["tokens"][token])
        return {
            "token": token,
            "id": id,
            "text": self.run.text.each([id])[0],
            "log_probs": log_probs,
            "probabilities": {name: _exp(value) for name, value in log_probs.items()},
            "missing": self._missing(log_probs),
            "ratio": ratio,
            "advantage": at["advantage"],
            "gradient_weight": at.get("loss_weight"),
            "kept": at["keep"],
            "reason": self._reason(token, at["keep"]),
            "band": {name: at[name] for name in (self.explained.band or {}).get("names", ())},
            "entropy": at["entropy"],
            "top_k": self._top_k(token),
            "version": at["policy_version"],
        }

    def _values(self, token: int) -> dict[str, Any]:
        """The values of the columns at a token; None where a column, or the value of a token of the context, is
        missing."""
        sampled = self._sampled(token)
        at: dict[str, Any] = {}
        for name, values in self.columns.items():
            value = None if values is None else values[token].item()
            is_nan = value != value
            at[name] = None if is_nan and not sampled else value
        return at

    def _missing(self, log_probs: Mapping[str, float | None]) -> dict[str, str]:
        """Explain why the log-probs of policies, and the mismatch, are unknown."""
        missing = {name: MISSING[name] for name, value in log_probs.items() if value is None and name in MISSING}
        _, why = self.mismatch
        if why:
            missing["mismatch"] = why
        return missing

    def _reason(self, token: int, keep: bool | None) -> str:
        """Explain why a token was kept or dropped; if that is unknown, say only what was recorded."""
        if not self._sampled(token):
            return "not sampled here: it is context, in no loss"
        reason = self.explained.reason(token)
        if self.explained.reasons is not None or self.row["outcome"] != "trained" or keep is None:
            return reason
        fate = "kept" if keep else "masked"
        return f"{fate}, as the trainer recorded; {reason}"

    def _sampled(self, token: int) -> bool:
        return self.row.get("sampled") is None or bool(self.row["sampled"][token])

    def _top_k(self, token: int) -> list[dict[str, Any]] | None:
        """Return the most probable tokens at a position, the engine's or recomputed ones; None if there are neither."""
        row = self.row
        recomputed = self.explained.alternatives
        if not self._sampled(token):
            return None
        if row.get("top_k") is not None and len(row["tokens"]):
            k = len(row["top_k"]) // len(row["tokens"])
            place = slice(token * k, (token + 1) * k)
            ids = row["top_k"][place]
            log_probs = row["top_k_log_prob"][place]
        elif recomputed is not None:
            ids, log_probs = (column[token] for column in recomputed)
        else:
            return None
        pairs = zip(ids.tolist(), self.run.text.each(ids.tolist()), log_probs.tolist(), strict=True)
        return [{"id": id, "text": piece, "log_prob": value} for id, piece, value in pairs]


def _exp(log_prob: float | None) -> float | None:
    return None if log_prob is None else math.exp(log_prob)


def stored_columns(row: Mapping[str, Any]) -> dict[str, NDArray[Any] | None]:
    """Return the columns stored in a row and those derived from two of its columns, [T] each."""
    columns = {name: row.get(name) for name in COLUMNS}
    current = row.get("log_prob")
    behavior = row.get("behavior_log_prob")
    if current is not None and behavior is not None:
        columns["log_ratio"] = current - behavior
        columns["divergence"] = np.abs(np.exp(current) - np.exp(behavior))
    columns["advantage"] = row.get("token_advantage")
    if columns["advantage"] is None and row.get("advantage") is not None:
        columns["advantage"] = np.full(len(row["tokens"]), row["advantage"], np.float32)
    return columns


def base64_column(values: NDArray[Any]) -> dict[str, str]:
    """Encode a column as base64 of its little-endian bytes, keyed by its type."""
    kind, dtype = {"b": ("u8", "u1"), "i": ("i32", "<i4")}.get(values.dtype.kind, ("f32", "<f4"))
    return {kind: base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()}


def first_difference(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """Find the first token that differs between two answers; null if all are equal."""
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    if len(differs):
        at = int(differs[0])
    elif len(first) == len(second):
        at = None
    else:
        at = shared
    return {"first_difference": at, "lengths": [len(first), len(second)]}


def completion_key(text: str) -> Key:
    """Parse `uid.sample.turn`. Raises: UserError for anything else."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.removeprefix("-").isdecimal() and len(part) < 20 for part in parts):
        raise UserError("a completion is named uid.sample.turn, three numbers")
    uid, sample, turn = map(int, parts)
    return uid, sample, turn


@dataclass(frozen=True, eq=False)
class ExplainedTokens:
    """The decisions about the tokens of a completion, as columns and in words.

    Args:
        reasons: None: `stored.problem()` says why there are none.
        alternatives: recomputed ids and log-probs, [T, K].
    """

    stored: StoredTokens
    reasons: TokenReasons | None
    alternatives: tuple[NDArray[Any], NDArray[Any]] | None

    @classmethod
    def of(cls, run: ViewedRun, step: int, row: Mapping[str, Any]) -> "ExplainedTokens":
        """Explain a completion of a step."""
        recomputed: dict[str, Any] = {}
        if run.recompute:
            recomputed = recomputed_columns(run)(step, row)
        alternatives = recomputed.pop("alternatives", None)
        specs = LossSpecs.of(run.recipe).at_step(run.metrics_of(step))
        stored = StoredTokens(row=row, specs=specs, step=step, recomputed=recomputed)
        return cls(stored, stored.reasons(), alternatives)

    @cached_property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns that derive from the row, [T] each."""
        columns = dict(self.stored.recomputed)
        proximal = self.stored.proximal_log_prob
        if proximal is not None:
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
        if self.reasons is None:
            return self.stored.problem()
        return str(self.reasons.reason(token))


ALTERNATIVES = 8  # the most probable tokens at each position


@dataclass(frozen=True, eq=False)
class RecomputedColumns:
    """Columns that a run does not store, computed from its weights: `proxima view --recompute`.

    Runs completions through the checkpoint before their step, which is the proximal policy, and through the model
    that the run began with, its reference. One model of each kind is kept in memory."""

    run: ViewedRun
    _models: dict[Path, Any] = field(default_factory=dict, repr=False)

    def __call__(self, step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Compute `proximal_log_prob` and `reference_log_prob` [T], nats, at the sampling temperature, and
        `alternatives`, ids and log-probs [T, ALTERNATIVES]; columns whose weights are missing are left out."""
        first = Path(self.run.model)
        columns = dict[str, Any]()
        if step == 1:
            before = first
        else:
            before = self.run.files.checkpoint(step - 1) / "model"
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
            raise UserError("values that were not stored can't be recomputed for a prompt with images")
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
