"""Rollouts and evals as Parquet: real numbers there and back, and a file that is whole or absent."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.runtime.state.rollouts import (
    EVAL_SCHEMA,
    ROLLOUT_SCHEMA,
    CompletionRecord,
    read_rows,
    read_table,
    write_evals,
    write_rollouts,
)
from proxima.training.objectives.protocol import TokenStatistics


def make_group(uid=7, text="Four.", scores=None):
    prompt = Prompt(
        uid=uid,
        messages=({"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 2?"}),
        tokens=(1, 5, 9),
        answer={"value": 4},
    )
    completions = tuple(
        replace(
            Completion.of_text(uid, i, text, tokens, "stop" if tokens else "abort"),
            sampled_log_prob=[-0.25 * (t + 1) for t in range(len(tokens))],
            untruncated_log_prob=[-0.5 * (t + 1) for t in range(len(tokens))],
            policy_version=3,
            temperature=0.75,
        )
        for i, tokens in enumerate(((11, 12, 2), ()))
    )
    scores = scores or (
        Score(value=1.5, parts={"answer": 1.0, "format": 0.5}, correct=True),
        Score.failed("timed out after 5 s"),
    )
    return Group(prompt=prompt, completions=completions, scores=scores)


TRAINED, INVALID = (7, 0, 0), (7, 1, 0)
RECORDS = {
    TRAINED: CompletionRecord(
        outcome="trained",
        advantage=0.5,
        trajectory=Trajectory.of(make_group().prompt, make_group().completions[0], group=0, advantage=0.5),
        statistics=TokenStatistics(log_prob=(-0.25, -0.5, -1.0), keep=(True, False, True), entropy=(0.125, 0.0, 2.0)),
    ),
    INVALID: CompletionRecord(outcome="invalid"),
}


FIRST = dict.fromkeys(ROLLOUT_SCHEMA.names) | {
    "step": 12,
    "prompt_uid": 7,
    "sample": 0,
    "turn": 0,
    "question": "What is 2 + 2?",
    "answer": {"value": 4},
    "text": "Four.",
    "prompt_tokens": [1, 5, 9],
    "tokens": [11, 12, 2],
    "sampled_log_prob": [-0.25, -0.5, -0.75],
    "untruncated_log_prob": [-0.5, -1.0, -1.5],
    "behavior_log_prob": [-0.5, -1.0, -1.5],
    "policy_version": [3, 3, 3],
    "log_prob": [-0.25, -0.5, -1.0],
    "keep": [True, False, True],
    "entropy": [0.125, 0.0, 2.0],
    "reward": 1.5,
    "valid": True,
    "parts": {"answer": 1.0, "format": 0.5},
    "correct": True,
    "advantage": 0.5,
    "finish_reason": "stop",
    "temperature": 0.75,
    "outcome": "trained",
    "used": True,
}
BOTH = {"step", "prompt_uid", "turn", "question", "answer", "text", "prompt_tokens", "temperature", "used"}
SECOND = {  # what it has besides; nothing was sampled
    "sample": 1,
    "tokens": [],
    "sampled_log_prob": [],
    "untruncated_log_prob": [],
    "policy_version": [],
    "valid": False,
    "parts": {},
    "error": "timed out after 5 s",
    "finish_reason": "abort",
    "outcome": "invalid",
}


def test_there_and_back(tmp_path):
    path = tmp_path / "000012.parquet"
    write_rollouts(path, 12, [make_group()], RECORDS)
    assert read_rows(path) == [FIRST, FIRST | dict.fromkeys(FIRST.keys() - SECOND.keys() - BOTH) | SECOND]


def test_log_probs_that_nothing_truncated_are_written_once(tmp_path):
    group = make_group()
    first, *others = group.completions
    whole = replace(first, untruncated_log_prob=first.sampled_log_prob.copy())
    group, path = replace(group, completions=(whole, *others)), tmp_path / "a.parquet"
    write_rollouts(path, 1, [group], RECORDS)
    assert pq.read_table(path)["untruncated_log_prob"].to_pylist() == [None, None]
    assert read_rows(path)[0]["untruncated_log_prob"] == [-0.25, -0.5, -0.75]
    name = "untruncated_log_prob"
    assert read_rows(path, [name]) == [{name: [-0.25, -0.5, -0.75]}, {name: []}]
    write_rollouts(path, 1, [make_group()], RECORDS)
    assert pq.read_table(path)["untruncated_log_prob"].to_pylist() == [[-0.5, -1.0, -1.5], None]


def test_records_are_found_by_identity_and_keep_token_columns(tmp_path):
    path, group = tmp_path / "a.parquet", make_group()
    varied = Trajectory.of(group.prompt, group.completions[0], group=0, advantage=[0.5, 0.0, -0.5], behavior="sampled")
    shaped = replace(varied, reward=[-0.5, 0.0, 2.0])
    records = {TRAINED: CompletionRecord(outcome="trained", advantage=0.0, trajectory=shaped)}
    write_rollouts(path, 1, [group], dict(reversed((RECORDS | records).items())))
    first, second = read_rows(path)
    assert first["outcome"] == "trained" and second["outcome"] == "invalid"
    assert first["token_reward"] == [-0.5, 0.0, 2.0]
    assert first["token_advantage"] == [0.5, 0.0, -0.5] and first["behavior_log_prob"] == [-0.25, -0.5, -0.75]


def test_types_are_those_of_the_contract(tmp_path):
    path = tmp_path / "a.parquet"
    write_rollouts(path, 1, [make_group()], RECORDS)
    schema = pq.read_schema(path)
    types = {name: str(schema.field(name).type) for name in schema.names}
    assert {kind: {name for name in types if types[name] == kind} for kind in types.values()} == TYPES


TYPES = {
    "int32": {"step", "sample", "turn", "updates_before"},
    "int64": {"prompt_uid"},
    "string": {"question", "answer", "text", "finish_reason", "parts", "error", "outcome"},
    "bool": {"correct", "valid", "used"},
    "double": {"reward", "advantage", "temperature", "baseline"},
    "list<element: bool not null>": {"selected", "keep"},
    "list<element: int32 not null>": {
        *("tokens", "prompt_tokens", "policy_version", "top_k", "sampling_mask", "sampling_mask_counts")
    },
    "list<element: float not null>": {
        *("sampled_log_prob", "untruncated_log_prob", "behavior_log_prob", "next_log_prob", "proximal_log_prob"),
        *("token_advantage", "token_reward", "top_k_divergence", "log_prob", "entropy", "top_k_log_prob"),
    },
}


def test_evals_and_an_empty_step(tmp_path):
    write_evals(tmp_path / "e.parquet", 40, [make_group(), make_group(uid=8)])
    rows = read_rows(tmp_path / "e.parquet")
    facts = [(r["step"], r["prompt_uid"], r["sample"], r["correct"]) for r in rows]
    assert facts == [(40, 7, 0, True), (40, 7, 1, None), (40, 8, 0, True), (40, 8, 1, None)]
    assert set(rows[0]) == set(EVAL_SCHEMA.names)
    write_rollouts(tmp_path / "r.parquet", 1, [], {})
    assert read_table(tmp_path / "r.parquet").num_rows == 0
    assert set(read_table(tmp_path / "r.parquet").column_names) == set(ROLLOUT_SCHEMA.names)


def test_text_that_is_no_utf8(tmp_path):
    write_evals(tmp_path / "e.parquet", 1, [make_group(text="half \ud83d of a pair, \x00 and </script>")])
    assert read_rows(tmp_path / "e.parquet")[0]["text"] == "half ? of a pair, \x00 and </script>"


def test_lengths_are_checked(tmp_path):
    path = tmp_path / "a.parquet"
    with pytest.raises(KeyError, match=r"\(7, 1, 0\)"):
        write_rollouts(path, 1, [make_group()], {TRAINED: RECORDS[TRAINED]})
    short = CompletionRecord(outcome="trained", statistics=TokenStatistics(log_prob=(-1.0,) * 3, keep=(True,)))
    with pytest.raises(ValueError, match=r"records.keep: 1 values for 3 tokens of prompt 7, sample 0"):
        write_rollouts(path, 1, [make_group()], RECORDS | {TRAINED: short})
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_named(tmp_path):
    path = tmp_path / "000001.parquet"
    write_evals(path, 1, [make_group()])
    path.write_bytes(path.read_bytes()[:-20])
    said = r"000001.parquet is not a complete Parquet file .* delete it to read the others"
    with pytest.raises(ValueError, match=said):
        read_rows(path)
