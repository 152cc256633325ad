"""Groups in Parquet, of every kind: exact there and back, in the file of a step and in that of a checkpoint."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from proxima.data.columns import SamplingMask
from proxima.data.episode import Episode, Span, ToolCall
from proxima.data.flow import Group, Prompt, Score
from proxima.runtime.state.pending_files import read_groups, write_groups
from proxima.runtime.state.rollouts import read_rows, write_evals, write_rollouts
from proxima.runtime.state.stored_completions import stored_groups
from proxima.view.microscope.step_file import StepFile
from tests.runtime.state.test_rollouts import RECORDS, make_group

CALL = ToolCall(name="f", arguments={"a": 1, "b": [2.5, "\u2028\ud800"]})
SPANS = (
    Span(role="assistant", tokens=2, text="a\ud800", sampled=True, reward=0.5, calls=(CALL,), state="s"),
    Span(role="tool", tokens=1, text="é", error=True, unreadable=("no JSON",)),
)


def of_first(**columns) -> Group:
    """A group whose first completion has these columns too."""
    group = make_group()
    first, empty = group.completions
    return replace(group, completions=(replace(first, **columns), empty))


def likeliest() -> Group:
    log_probs = np.array([[-0.5, -1.0], [-0.25, -2.0], [-0.125, -3.0]], np.float32)
    mask = SamplingMask.of_sets([[11], [3, 12], [2, 4, 5]])
    return of_first(top_k=np.array([[11, 3], [12, 3], [2, 4]], np.int32), top_k_log_prob=log_probs, sampling_mask=mask)


def routed(dtype) -> Group:
    ids = np.random.default_rng(0).integers(-1, 127, (3, 5, 2)).astype(dtype)
    return of_first(routed_experts=ids, prompt_routed_experts=ids[:, ::-1].copy())


def played() -> Group:
    """The first completion has three paths, the second failed."""
    group = make_group()
    first, empty = group.completions
    mask = np.array([True, True, False])
    paths = [
        replace(first, turn=i, sampled=np.roll(mask, i), episode=Episode(spans=SPANS, forks=2, cut="turns"))
        for i in range(3)
    ]
    paths[2] = replace(paths[2], initial_prompt=Prompt(uid=7, messages=(), tokens=[4, 2]))
    whole = replace(paths[2], episode=replace(paths[2].episode, reward=0.1), earlier=tuple(paths[:2]))
    failed = replace(empty, sampled=np.zeros(0, np.bool_), episode=Episode(failure="it broke", attempts=3))
    return replace(group, completions=(whole, failed))


GROUPS = {
    "plain": make_group(),
    "likeliest tokens and those that could be sampled": likeliest(),
    "routes in int8": routed("int8"),
    "routes in int16": routed("int16"),
    "episodes": played(),
}


def write_step(file, group: Group) -> None:
    paths = {path.key: RECORDS[7, 0, 0] for path in group.completions[0].paths}
    write_rollouts(file, 1, [group], RECORDS | paths)


@pytest.mark.parametrize("kind", GROUPS)
def test_there_and_back(kind, tmp_path):
    group, step, pending = GROUPS[kind], tmp_path / "000001.parquet", tmp_path / "groups.parquet"
    write_step(step, group)
    write_groups(pending, [group])
    ((of_step,), _), (of_checkpoint,) = stored_groups(step), read_groups(pending)
    for read in (of_step, of_checkpoint):
        assert read.completions == group.completions
        assert read.oldest_version == group.oldest_version
        assert read.scores[0] == group.scores[0] and not read.scores[1].valid
        if "routes" in kind:
            assert read.completions[0].routed_experts.dtype == group.completions[0].routed_experts.dtype
    assert of_checkpoint == replace(group, scores=of_checkpoint.scores)  # which holds a NaN
    assert any("routed" in name for name in pq.read_schema(pending).names) == ("routes" in kind)
    write_evals(tmp_path / "evals.parquet", 1, [group])
    assert not any("routed" in name for name in pq.read_schema(tmp_path / "evals.parquet").names)  # nothing reads them


def test_routes_of_no_token_and_a_file_that_is_not_there(tmp_path):
    group = make_group()
    first, empty = routed("int8").completions
    none = replace(empty, routed_experts=first.routed_experts[:0])
    write_groups(tmp_path / "groups.parquet", [replace(group, completions=(first, none))])
    assert read_groups(tmp_path / "groups.parquet")[0].completions == (first, empty)
    assert read_groups(tmp_path / "none.parquet") == []


def test_what_no_file_can_hold_does_not_cost_the_checkpoint(tmp_path):
    group = make_group(text="a\ud800", scores=(Score.failed("\ud801"),) * 2)
    asked = {"role": "user", "content": "\udfff?"}
    prompt = replace(group.prompt, messages=(asked,), answer=torch.tensor(2.5), metadata={"x": math.nan}, chat=True)
    write_groups(tmp_path / "p.parquet", [replace(group, prompt=prompt, baseline=0.5)])
    (read,) = read_groups(tmp_path / "p.parquet")
    assert (read.completions[0].text, read.scores[0].error, read.prompt.question) == ("a?", "?", "??")
    assert (read.prompt.answer, read.prompt.metadata, read.prompt.chat, read.baseline) == (2.5, {"x": None}, True, 0.5)


def test_a_row_for_each_path(tmp_path):
    write_step(tmp_path / "a.parquet", played())
    write_evals(tmp_path / "b.parquet", 1, [played()])
    rows = read_rows(tmp_path / "a.parquet")
    assert [(row["sample"], row["turn"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [json.loads(row["episode"])["reward"] for row in rows] == [None, None, 0.1, None]
    assert [(row["sample"], row["turn"]) for row in read_rows(tmp_path / "b.parquet")] == [(0, 2), (1, 0)]


def test_the_viewer_shows_an_opening_as_the_prompt(tmp_path):
    write_step(tmp_path / "000001.parquet", played())
    prompt = make_group().prompt.tokens.tolist()
    for names in (None, ("tokens", "prompt_tokens")):
        rows = StepFile(tmp_path / "000001.parquet").read([0, 1, 2], names)
        assert [row["prompt_tokens"].tolist() for row in rows] == [prompt, prompt, [4, 2]]
        assert not any("opening" in row for row in rows)
