"""A run as the microscope reads it: its recipe, its tokens as text, and the current content of its folder, checked at
each request."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from proxima.core.correction.health import verdicts
from proxima.data import UserError
from proxima.data.image_tokens import patch_text
from proxima.experiments.run_progress import GrowingRecords
from proxima.experiments.run_reader import read_config, read_summary
from proxima.runtime.state.folder import RunFolder
from proxima.system.locks import is_held
from proxima.view.microscope.step_file import StepFile
from proxima.view.microscope.trend import VITAL, guard_of, last_stages, metric_groups, trend_of, weight_bounds_of

Value = TypeVar("Value")
STEPS_KEPT = 4  # step tables kept in memory


BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of a token that is part of a character


class TokenText:
    """Decodes ids one by one.

    Args:
        file: tokenizer.json; None: not available here, so that a token is shown as its id.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file

    @classmethod
    def of_run(cls, folder: Path, model: str) -> "TokenText":
        """Load the tokenizer from the model's folder, from a checkpoint of the run, or from the hub's cache."""
        places = [Path(model), *sorted((folder / "checkpoints").glob("*/model"), reverse=True)]
        for place in places:
            file = place / "tokenizer.json"
            if file.is_file():
                return cls(file)
        if not model:
            return cls(None)
        return cls(_cached(model))

    @cached_property
    def _tokenizer(self) -> Any:
        if self.file is None:
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self.file))
        except Exception:  # tokenizers' own class, for an unreadable file
            return None

    def each(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. A character made of several tokens is the text of the last one; the others
        have an empty text."""
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in ids]
        shown = {at: patch_text(token) for at, token in enumerate(ids) if token < 0}
        ids = [max(token, 0) for token in ids]
        texts = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        for at, token in enumerate(ids):
            piece = texts[at]
            if not piece or piece[0].isspace() or piece[0] == BROKEN:
                continue
            if (self._tokenizer.id_to_token(token) or "").startswith("▁"):
                texts[at] = f" {piece}"  # decoders of such tokens drop the leading space
        return [shown.get(at, text) for at, text in enumerate(self._joined(ids, texts))]

    def _joined(self, ids: list[int], texts: list[str]) -> list[str]:
        """Join the parts that together make whole characters."""
        at = 0
        while at < len(ids):
            if BROKEN in texts[at]:
                for end in range(at + 2, min(at + 5, len(ids) + 1)):
                    whole = self._tokenizer.decode(ids[at:end], skip_special_tokens=False)
                    if BROKEN not in whole:
                        texts[at : end - 1] = [""] * (end - 1 - at)
                        texts[end - 1] = whole
                        at = end - 1
                        break
            at += 1
        return texts


def _cached(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "tokenizer.json")
    except Exception:  # not a model name of the hub
        return None
    return Path(file) if isinstance(file, str) else None


@dataclass(frozen=True, eq=False)
class ViewedRun:
    """A run folder; none of its files is held open.

    Args:
        number: number of the run, in the order of the command line.
        recompute: compute columns that are not stored from the weights of the run.
        name: that tells it from the others; default: its folder's.
    """

    number: int
    files: RunFolder
    recompute: bool = False
    name: str = ""
    _cache: dict[Path, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The values of config.yaml; empty if it is missing or damaged."""
        try:
            return self._read(self.files.config, lambda: read_config(self.files.config))
        except (OSError, UserError):
            return {}

    @property
    def algorithm(self) -> Mapping[str, Any]:
        return _mapping(self.recipe.get("algorithm"))

    @property
    def surrogate(self) -> str | None:
        """The kind of the surrogate; None without one."""
        return _mapping(self.algorithm.get("surrogate")).get("kind")

    @property
    def model(self) -> str:
        """Folder or name of the model; empty if unknown."""
        return str(_mapping(self.recipe.get("model")).get("path") or "")

    def metrics_of(self, step: int) -> Mapping[str, Any]:
        """The line of metrics.jsonl of a training step; empty if there is none."""
        lines = (line for line in self.records() if line.get("kind") == "train" and line.get("step") == step)
        return next(lines, {})

    @property
    def offline(self) -> bool:
        return bool(self.recipe) and "reward" not in self.recipe

    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl. Raises: UserError if a line is damaged."""
        try:
            self._read(self.files.metrics, self._growing.poll)
        except FileNotFoundError:
            return []
        return self._growing.records

    @cached_property
    def text(self) -> TokenText:
        """Its tokens as text."""
        return TokenText.of_run(self.files.path, self.model)

    @cached_property
    def _growing(self) -> GrowingRecords:
        return GrowingRecords(self.files.metrics)

    def _read(self, file: Path, read: Callable[[], Value]) -> Value:
        """Return the result of `read`, cached while the file is unchanged. FileNotFoundError without a file."""
        stat = file.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._cache.get(file, (None,))[0] != stamp:
            self._cache[file] = stamp, read()
        value: Value = self._cache[file][1]
        return value

    def rollout_steps(self) -> list[int]:
        """Return the steps whose completions are stored."""
        if self.files.rollouts.is_dir():
            names = os.listdir(self.files.rollouts)
        else:
            names = []
        stems = (name.removesuffix(".parquet") for name in names if name.endswith(".parquet"))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def step(self, number: int) -> StepFile:
        """Return the completions of a step. Raises: UserError, see `StepFile`."""
        path = self.files.rollout_file(number)
        try:
            file = self._read(path, lambda: StepFile(path))
        except OSError:
            raise UserError(
                f"step {number} has no completions here: it is not finished, or its file was deleted"
            ) from None
        self._cache[path] = self._cache.pop(path)  # move it to the end: most recently used
        for earlier in [key for key in self._cache if key.suffix == ".parquet"][:-STEPS_KEPT]:
            del self._cache[earlier]
        return file

    def about(self) -> dict[str, Any]:
        """Summarise the run, including any problem of its folder."""
        summary = read_summary(self.files)
        problem = self.problem()
        steps = 0
        if problem is None or self.files.metrics.is_file():
            try:
                steps = self.last_step()
            except UserError as error:
                problem = str(error)
        return {
            "run": self.number,
            "name": self.name or self.files.path.resolve().name,
            "folder": str(self.files.path),
            "kind": "offline" if self.offline else "rl",
            "algorithm": summary.get("algorithm") or self.algorithm.get("preset") or self.surrogate,
            "model": Path(str(summary.get("model") or self.model or "unknown model")).name,
            "steps": steps,
            "state": self.state_text(summary, steps),
            "error": summary.get("error"),
            "problem": problem,
        }

    def state_text(self, summary: Mapping[str, Any], steps: int) -> str:
        """`finished, 50 steps`, `stopped after 41 of 50 steps`: how the run ended, or that it did not."""
        planned = _mapping(self.recipe.get("train")).get("steps") or steps  # a recipe of whole epochs has none
        if steps != planned:
            of = f"{steps} of {planned} steps"
        else:
            of = "1 step" if steps == 1 else f"{steps} steps"
        if summary.get("status") == "done":
            plateau = summary.get("plateau")
            if plateau:
                return f"ended early, {of}: {plateau}"
            return f"finished, {of}"
        if summary:
            return f"{summary.get('status', 'ended')} after {of}"
        if is_held(self.files.lock):  # a run that was killed holds no lock
            return f"running, {of}"
        return f"unfinished, {of}"

    def problem(self) -> str | None:
        """Describe a problem of the folder as a whole; damaged steps other than the last are reported when opened."""
        if not self.files.has_run:
            return "the folder has no run, or is gone; give the one that `proxima train` printed"
        if not self.recipe:
            return "config.yaml is missing or damaged: curves and texts are shown, what the algorithm did is not known"
        steps = self.rollout_steps()
        try:
            for step in steps[-1:]:
                self.step(step)
        except UserError as error:
            return str(error)
        except Exception as error:  # a damaged file: errors of Arrow, or of what it decoded from wrong bytes
            return " ".join(f"step {steps[-1]}: {type(error).__name__}: {error}".split())[:300]
        return None

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl, 0 without one. Raises: UserError for a damaged file."""
        return next((int(r["step"]) for r in reversed(self.records()) if r["kind"] == "train"), 0)

    def version_before(self, step: int) -> int | None:
        """Return the version of the weights at the beginning of a step; None if metrics.jsonl does not say."""
        if step == 1:
            return 0
        return next(
            (r.get("policy_version") for r in self.records() if r["kind"] == "train" and r["step"] == step - 1), None
        )

    def state(self) -> dict[str, Any]:
        """Return the state that a page polls while the run continues."""
        steps = self.rollout_steps()
        return {"step": self.last_step(), "running": not read_summary(self.files), "steps": steps}

    def trend(self, after: int = 0) -> dict[str, Any]:
        """Return the curves for the steps after `after`, see `trend_of`, and the steps with stored completions."""
        return trend_of(self.records(), self.algorithm, after) | {"rollout_steps": self.rollout_steps()}

    def vital_signs(self, step: int) -> dict[str, Any]:
        """Return the vital metrics of a step; empty if it is not finished."""
        record = next((r for r in self.records() if r.get("step") == step and r.get("kind") == "train"), {})
        return {name: record[name] for name in metric_groups()[VITAL] if name in record}

    def verdicts(self, step: int) -> dict[str, str]:
        """Return healthy, watch or broken for each of the vital metrics of a step that has an ideal range."""
        guard = guard_of(self.algorithm)
        return dict(verdicts(self.vital_signs(step), guard, weight_bounds_of(self.algorithm)))

    def timeline(self) -> list[dict[str, Any]] | None:
        """Return the spans of the last steps of timeline.json, see `last_stages`; None without the file."""
        return last_stages(self.files.timeline)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
