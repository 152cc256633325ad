"""The folder of an evaluation: what it holds, and reading it back.

result.json
every figure with its interval, sampling, prompt, rewards, seed, versions, hashes of model and data; the same command
                   gives the same bytes
<suite>.parquet    one row a completion: what was asked, written, extracted and judged
environment.json   machine, command, time: what may differ between two runs of one command
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from proxima.data import Group, UserError
from proxima.evaluate.votes import canonical

FORMAT = "proxima evaluation 1"
RESULT, ENVIRONMENT = "result.json", "environment.json"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False, metadata={"doc": "of the data set, from 0"}),
        pa.field("prompt_uid", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field(
            "question",
            pa.string(),
            nullable=False,
            metadata={"doc": "the last user message, with the suite's template"},
        ),
        pa.field("answer", pa.string(), nullable=False, metadata={"doc": "JSON: what the reward compared with"}),
        pa.field("text", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("correct", pa.bool_(), metadata={"doc": "null where no reward knows, or the score is invalid"}),
        pa.field("reward", pa.float64(), metadata={"doc": "weighted sum; null where the score is invalid"}),
        pa.field(
            "parts", pa.string(), nullable=False, metadata={"doc": "JSON: each reward by name, before its weight"}
        ),
        pa.field("extracted", pa.string(), metadata={"doc": "the answer found in the text; null where there is none"}),
        pa.field("vote", pa.string(), metadata={"doc": "the extracted answer in its one form"}),
        pa.field("length", pa.int32(), nullable=False, metadata={"doc": "tokens"}),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field(
            "valid",
            pa.bool_(),
            nullable=False,
            metadata={"doc": "false: a scorer failed, the completion enters no figure"},
        ),
        pa.field("error", pa.string(), metadata={"doc": "why the score is invalid"}),
        pa.field(
            "log_prob_sum",
            pa.float64(),
            nullable=False,
            metadata={"doc": "nats, under what was sampled; greedy: at temperature 1"},
        ),
        pa.field("metadata", pa.string(), nullable=False, metadata={"doc": "JSON: level, source … of the row"}),
    ],
    metadata={"proxima": FORMAT},
)


def completions_table(groups: Sequence[Group], first_uid: int, extract: Callable[[str], str | None] | None) -> pa.Table:
    """A suite's completions as the table above; `first_uid` is the uid of the data set's row 0."""
    rows = list(_items(groups, first_uid, extract))
    return pa.Table.from_pydict(
        {f.name: pa.array([row[f.name] for row in rows], f.type) for f in SCHEMA}, schema=SCHEMA
    )


def _items(
    groups: Sequence[Group], first_uid: int, extract: Callable[[str], str | None] | None
) -> Iterator[dict[str, Any]]:
    for group in groups:
        prompt = group.prompt
        for completion, score in zip(group.completions, group.scores, strict=True):
            extracted = None if extract is None else extract(completion.text)
            vote = canonical(extracted)
            yield {
                "row": prompt.uid - first_uid,
                "prompt_uid": prompt.uid,
                "sample": completion.sample,
                "question": utf8(prompt.question),
                "answer": utf8(_json(prompt.answer)),
                "text": utf8(completion.text),
                "tokens": completion.tokens.tolist(),
                "correct": score.correct if score.valid else None,
                "reward": float(score.value) if score.valid else None,
                "parts": utf8(_json(dict(score.parts))),
                "extracted": None if extracted is None else utf8(extracted),
                "vote": None if vote is None else utf8(str(vote)),
                "length": len(completion.tokens),
                "finish_reason": completion.finish_reason,
                "valid": score.valid,
                "error": None if score.error is None else utf8(score.error),
                "log_prob_sum": float(completion.sampled_log_prob.sum(dtype="float64")),
                "metadata": utf8(_json(dict(prompt.metadata))),
            }


def utf8(text: str) -> str:
    """Replace lone surrogates, which a tokenizer can bring and UTF-8 can't hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, allow_nan=True)


def questions_sha(questions: Sequence[tuple[str, Any]]) -> str:
    """A hash of what was asked: question texts and answers, in order."""
    digest = sha256()
    for question, answer in questions:
        digest.update(utf8(json.dumps([question, answer], ensure_ascii=False, default=str)).encode() + b"\n")
    return digest.hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QuestionResult:
    """One question of a result, with what its samples came to."""

    question: str
    answer: str
    correct: tuple[bool | None, ...]
    rewards: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """A result read back.

    Args:
        path: as given.
        suites: suite → question uid → what came of it. A run's evaluation has one, `held-out`.
        facts: result.json; empty for a run's evaluation.
    """

    path: Path
    suites: Mapping[str, Mapping[int, QuestionResult]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def sampled_alike(self, other: "EvalResult", name: str) -> bool | None:
        """Whether both drew with the same settings; None where one does not say."""
        mine, theirs = (one.facts.get("suites", {}).get(name, {}).get("sampling") for one in (self, other))
        return None if mine is None or theirs is None else bool(mine == theirs)


def read_result(path: str | Path) -> EvalResult:
    """An evaluation's folder, a run's folder (its last evaluation), or a Parquet file of either.

    Raises:
        ValueError: nothing there, an evaluation that did not end, or files that can't be read; names them.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return EvalResult(
            path=place, suites={"held-out" if place.parent.name == "evals" else place.stem: read_completions(place)}
        )
    if (place / RESULT).is_file():
        try:
            facts = json.loads((place / RESULT).read_text(encoding="utf-8"))
            names = list(facts["suites"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place / RESULT} is no result of proxima eval ({error}); evaluate again") from None
        return EvalResult(
            path=place, suites={name: read_completions(place / f"{name}.parquet") for name in names}, facts=facts
        )
    if files := sorted((place / "evals").glob("[0-9]*-*.parquet"), key=lambda file: int(file.stem.partition("-")[0])):
        return EvalResult(path=place, suites={"held-out": read_completions(files[-1])})
    if not place.exists():
        raise UserError(f"{path} does not exist; give the folder that proxima eval wrote, or a run")
    unfinished = " (its evaluation did not end: run it again with --overwrite)" if list(place.glob("*.parquet")) else ""
    raise UserError(f"{path} holds no {RESULT}{unfinished}; give the folder that proxima eval wrote, or a run")


def read_completions(file: Path) -> dict[int, QuestionResult]:
    """uid → what came of the question, samples in order.

    Raises:
        ValueError: no such file, no Parquet, or other columns; names it.
    """
    columns = ["prompt_uid", "sample", "question", "answer", "correct", "reward"]
    try:
        rows = pq.read_table(file, columns=columns, partitioning=None).to_pylist()
    except (OSError, pa.ArrowInvalid, pa.ArrowKeyError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{file} can't be read as an evaluation: {reason[:160]}") from None
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["prompt_uid"], []).append(row)
    return {
        uid: QuestionResult(
            question=own[0]["question"],
            answer=own[0]["answer"],
            correct=tuple(row["correct"] for row in sorted(own, key=lambda row: row["sample"])),
            rewards=tuple(row["reward"] for row in sorted(own, key=lambda row: row["sample"])),
        )
        for uid, own in sorted(found.items())
    }
