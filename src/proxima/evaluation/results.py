"""The content of an evaluation's folder, and reading it back.

result.json        metrics with intervals, sampling, prompt, rewards, seed, versions, hashes of model and data; the
                   same command gives the same bytes
<suite>.parquet    a row per completion: question, text, extracted answer, score
environment.json   machine, command, time: may differ between two runs of the same command
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from proxima.data import UserError
from proxima.data.episode import Episode
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.json_reader import load_json
from proxima.evaluation.eval_files import eval_files_in, set_of, step_of
from proxima.evaluation.headline import ACCURACY
from proxima.evaluation.votes import Extract, canonical
from proxima.system.damage import check_columns, reading
from proxima.system.jsonl import utf8
from proxima.task.mix import TaskSource, source_of

FORMAT = "proxima evaluation 1"
RESULT = "result.json"
ENVIRONMENT = "environment.json"
OF_SUITE = "/"  # between the name of a suite and that of a source of its questions
NULL = "null: "  # marks a column that may be null, in COLUMNS
COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "row": (pa.int64(), "of the data set, from 0"),
    "prompt_uid": (pa.int64(), ""),
    "sample": (pa.int32(), ""),
    "question": (pa.string(), "the last user message, with the suite's template"),
    "answer": (pa.string(), "JSON: what the reward compared with"),
    "text": (pa.string(), ""),
    "tokens": (pa.list_(pa.int32()), ""),
    "correct": (pa.bool_(), f"{NULL}no reward decides, or the score is invalid"),
    "reward": (pa.float64(), f"{NULL}the score is invalid; otherwise the weighted sum"),
    "parts": (pa.string(), "JSON: each reward by name, before its weight"),
    "extracted": (pa.string(), f"{NULL}no answer in the text; otherwise the answer"),
    "vote": (pa.string(), f"{NULL}no answer; otherwise its canonical form"),
    "length": (pa.int32(), "tokens"),
    "finish_reason": (pa.string(), ""),
    "valid": (pa.bool_(), "false: a reward failed, the completion is in no metric"),
    "error": (pa.string(), f"{NULL}the score is valid; otherwise why it is not"),
    "log_prob_sum": (pa.float64(), "nats, under the sampled distribution; greedy: at temperature 1"),
    "metadata": (pa.string(), "JSON: level, source … of the row"),
}


def _field(name: str, kind: pa.DataType, doc: str) -> pa.Field:
    metadata = {"doc": doc} if doc else None
    return pa.field(name, kind, nullable=doc.startswith(NULL), metadata=metadata)


SCHEMA = pa.schema([_field(name, kind, doc) for name, (kind, doc) in COLUMNS.items()], metadata={"proxima": FORMAT})
SOURCE = pa.field("source", pa.string(), metadata={"doc": "the source of the question; only of a mix"})
EPISODE = pa.field("episode", pa.string(), metadata={"doc": "JSON: the messages, and how it ended; only of episodes"})


def completions_table(
    groups: Sequence[Group], first_uid: int, extract: Extract | None, sources: Sequence[TaskSource] = ()
) -> pa.Table:
    """A suite's completions with the columns of `SCHEMA`; `first_uid` is the uid of row 0 of the data set, `sources`
    are those of its task."""
    mixed = any(source.name for source in sources)
    played = False
    rows: list[dict[str, Any]] = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            row = _row(group.prompt, completion, score, extract)
            row["row"] = group.prompt.uid - first_uid
            if mixed:
                row["source"] = source_of(sources, group.prompt.metadata).name
            if completion.episode is not None:
                row["episode"] = completion.episode.to_json()
                played = True
            rows.append(row)
    schema = SCHEMA
    if mixed:
        schema = schema.append(SOURCE)
    if played:
        schema = schema.append(EPISODE)
    return pa.Table.from_pylist(rows, schema=schema)


def _row(prompt: Prompt, completion: Completion, score: Score, extract: Extract | None) -> dict[str, Any]:
    """The columns of a completion that depend on nothing else; one that is left out is null."""
    row = {
        "prompt_uid": prompt.uid,
        "sample": completion.sample,
        "question": utf8(prompt.question),
        "answer": utf8(_json(prompt.answer)),
        "text": utf8(completion.text),
        "tokens": completion.tokens.tolist(),
        "parts": utf8(_json(dict(score.parts))),
        "length": completion.generated,
        "finish_reason": completion.finish_reason,
        "valid": score.valid,
        "log_prob_sum": float(completion.sampled_log_prob.sum(dtype="float64")),
        "metadata": utf8(_json(dict(prompt.metadata))),
    }
    if score.valid:
        row["correct"] = score.correct
        row["reward"] = float(score.value)
    if score.error is not None:
        row["error"] = utf8(score.error)
    if extract is not None:
        extracted = extract(completion, prompt.begun)
        vote = canonical(extracted)
        if extracted is not None:
            row["extracted"] = utf8(extracted)
        if vote is not None:
            row["vote"] = utf8(str(vote))
    return row


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, allow_nan=True)


def questions_sha(questions: Sequence[tuple[str, Any]]) -> str:
    """A hash of the questions and their answers, in order."""
    digest = sha256()
    for question, answer in questions:
        digest.update(utf8(json.dumps([question, answer], ensure_ascii=False, default=str)).encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class QuestionResult:
    """One question of a result, with the scores of its samples, in order.

    Args:
        question: the last user message.
        answer: the reference answer, as JSON.
        correct: None if no reward decides, or the score is invalid.
        texts: the model's answers.
        source: that of a mix; empty: the task is none.
        metrics: name → value for each sample, None if unknown: `reward`, `length`, `truncated`, each reward by its
            name, and for episodes `turns` and `calls`.
    """

    question: str
    answer: str
    correct: tuple[bool | None, ...]
    metrics: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    source: str = ""

    def values(self, metric: str) -> tuple[float | None, ...]:
        """Return the values of the samples; all None for a metric that the question lacks."""
        if metric == ACCURACY:
            return self.correct
        return self.metrics.get(metric, (None,) * len(self.correct))


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """A result read back.

    Args:
        suites: suite → question uid → its scores. A run's evaluation has the suite `held-out` for `eval.task`, and one
            for each further set, by its name. The questions of each source of a mix are a further one, `suite/source`.
        facts: result.json; empty for a run's evaluation.
    """

    path: Path
    suites: Mapping[str, Mapping[int, QuestionResult]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def sampled_unlike(self, other: "EvalResult", name: str) -> tuple[str, ...]:
        """The settings in which two evaluations of a suite differ, by their keys in result.json: sampling, system
        prompt, template arguments, template date. Empty if none differs, or if those of one result are unknown."""
        first = self.facts.get("suites", {}).get(name, {})
        second = other.facts.get("suites", {}).get(name, {})
        if "sampling" not in first or "sampling" not in second:
            return ()
        settings = ("sampling", "system", "template_arguments", "template_date")
        return tuple(key for key in settings if (first.get(key) or None) != (second.get(key) or None))


def read_result(path: str | Path) -> EvalResult:
    """Read an evaluation's folder, a run's folder (its last evaluation), or a Parquet file of either.

    Raises: UserError if the path contains no evaluation or an unfinished one, or a file can't be read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        name = place.stem
        if place.parent.name == "evals":
            name = _suite_of(place)
        return EvalResult(path=place, suites=with_sources({name: read_completions(place)}))
    if (place / RESULT).is_file():
        with reading(place / RESULT, "evaluate again", "a result of proxima eval"):
            facts = load_json((place / RESULT).read_text(encoding="utf-8"))
            names = list({name: dict(suite) for name, suite in facts["suites"].items()})
        suites = {name: read_completions(place / f"{name}.parquet") for name in names}
        return EvalResult(path=place, suites=with_sources(suites), facts=facts)
    files = eval_files_in(place / "evals")
    if files:
        last = {_suite_of(file): file for file in files if step_of(file) == step_of(files[-1])}
        suites = {name: read_completions(file) for name, file in last.items()}
        return EvalResult(path=place, suites=with_sources(suites))
    if not place.exists():
        raise UserError(f"{path} does not exist; give the folder that proxima eval wrote, or a run")
    lacks = f"{path} has no {RESULT}"
    if any(place.glob("*.parquet")) or any(place.glob("*/asked.json")):
        lacks += " (the evaluation is unfinished: repeat its command, which goes on)"
    raise UserError(f"{lacks}; give the folder that proxima eval wrote, or a run")


def with_sources(suites: Mapping[str, Mapping[int, QuestionResult]]) -> dict[str, dict[int, QuestionResult]]:
    """The suites, each followed by the questions of each source of a mix, as `suite/source`."""
    every: dict[str, dict[int, QuestionResult]] = {}
    for name, questions in suites.items():
        every[name] = dict(questions)
        for uid, question in questions.items():
            if question.source:
                every.setdefault(f"{name}{OF_SUITE}{question.source}", {})[uid] = question
    return every


def _suite_of(file: Path) -> str:
    """The suite of a file of a run's evaluation."""
    return set_of(file) or "held-out"


def read_completions(file: Path) -> dict[int, QuestionResult]:
    """Read a Parquet file of completions: uid → the question with its samples' scores, in order. UserError if it can't
    be read."""
    columns = ["prompt_uid", "sample", "question", "answer", "text", "correct", "reward", "tokens", "finish_reason"]
    remedy = "give a file that proxima eval or a run's evaluation wrote, or write it again"
    if not file.exists():
        raise UserError(f"{file} does not exist", remedy=remedy)
    with reading(file, remedy, "an evaluation"):
        stored = pq.read_schema(file).names
        columns += [name for name in ("parts", "length", "sampled", "source", "episode") if name in stored]
        table = pq.read_table(file, columns=columns, partitioning=None)
        check_columns(table, dict(zip(SCHEMA.names, SCHEMA, strict=True)))
        return _results(table.to_pylist())


def _results(rows: Sequence[dict[str, Any]]) -> dict[int, QuestionResult]:
    by_uid: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_uid.setdefault(row["prompt_uid"], []).append(row)
    results = {}
    for uid, samples in sorted(by_uid.items()):
        first = samples[0]
        load_json(first["answer"])  # which readers show
        metrics = [_metrics(row) for row in samples]
        names = dict.fromkeys(chain.from_iterable(metrics))
        results[uid] = QuestionResult(
            question=first["question"],
            answer=first["answer"],
            correct=tuple(row["correct"] for row in samples),
            metrics={name: tuple(sample.get(name) for sample in metrics) for name in names},
            texts=tuple(row["text"] for row in samples),
            source=first.get("source") or "",
        )
    return results


def _metrics(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the entries of `QuestionResult.metrics` for one sample; a failed score has no `reward` and no parts."""
    length = row.get("length")
    if length is None and row.get("sampled") is not None:
        length = sum(row["sampled"])
    elif length is None:
        length = len(row["tokens"])
    metrics: dict[str, float | None] = {"length": float(length), "truncated": float(row["finish_reason"] == "length")}
    if row.get("episode") is not None:
        spans = [span for span in Episode.from_json(row["episode"]).spans if span.role == "assistant"]
        metrics["turns"] = float(len(spans))
        metrics["calls"] = float(sum(len(span.calls) for span in spans))
    if row["reward"] is None:
        return metrics
    parts = load_json(row.get("parts") or "{}")
    return {**parts, **metrics, "reward": row["reward"]}
