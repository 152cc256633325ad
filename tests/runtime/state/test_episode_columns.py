"""Episodes in Parquet: exact there and back, and a row for each path."""

import json
from dataclasses import replace

import numpy as np

from proxima.data import Episode, Group, Prompt, Span, ToolCall
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


def played() -> Group:
    """The first completion has three paths, the second failed."""
    group = make_group()
    first, empty = group.completions
    mask = np.array([True, True, False])
    paths = [
        replace(first, turn=i, sampled=np.roll(mask, i), episode=Episode(spans=SPANS, forks=2, cut="turns"))
        for i in range(3)
    ]
    paths[2] = replace(paths[2], opening=Prompt(uid=7, messages=(), tokens=[4, 2]))
    whole = replace(paths[2], episode=replace(paths[2].episode, reward=0.1), earlier=tuple(paths[:2]))
    failed = replace(empty, sampled=np.zeros(0, np.bool_), episode=Episode(failure="it broke", attempts=3))
    return replace(group, completions=(whole, failed))


def records(group: Group):
    record = RECORDS[7, 0, 0]
    return RECORDS | {path.key: record for path in group.completions[0].paths}


def test_there_and_back(tmp_path):
    group, file = played(), tmp_path / "000001.parquet"
    write_rollouts(file, 1, [group], records(group))
    write_groups(tmp_path / "groups.parquet", [group])
    for read in (stored_groups(file)[0][0], read_groups(tmp_path / "groups.parquet")[0]):
        assert len(read.completions) == len(read.scores) == 2
        first, failed = read.completions
        assert first.episode == group.completions[0].episode and failed.episode == group.completions[1].episode
        assert [path.turn for path in first.paths] == [0, 1, 2]
        for path, expected in zip(first.paths, group.completions[0].paths, strict=True):
            assert (
                path.sampled.tolist() == expected.sampled.tolist() and path.tokens.tolist() == expected.tokens.tolist()
            )
            assert path.sampled_log_prob.tobytes() == expected.sampled_log_prob.tobytes()
            assert (path.opening and path.opening.tokens.tolist()) == (expected.opening and [4, 2])
            assert path.policy_version.tolist() == expected.policy_version.tolist()
        assert first.generated == 6 and not failed.generated and read.oldest_version == group.oldest_version
    assert read_groups(tmp_path / "groups.parquet")[0].completions == group.completions


def test_a_row_for_each_path(tmp_path):
    group = played()
    write_rollouts(tmp_path / "a.parquet", 1, [group], records(group))
    write_evals(tmp_path / "b.parquet", 1, [group])
    rows = read_rows(tmp_path / "a.parquet")
    assert [(row["sample"], row["turn"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [json.loads(row["episode"])["reward"] for row in rows] == [None, None, 0.1, None]
    assert [(row["sample"], row["turn"]) for row in read_rows(tmp_path / "b.parquet")] == [(0, 2), (1, 0)]


def test_the_viewer_shows_an_opening_as_the_prompt(tmp_path):
    group = played()
    write_rollouts(tmp_path / "000001.parquet", 1, [group], records(group))
    prompt = group.prompt.tokens.tolist()
    for names in (None, ("tokens", "prompt_tokens")):
        rows = StepFile(tmp_path / "000001.parquet").read([0, 1, 2], names)
        assert [row["prompt_tokens"].tolist() for row in rows] == [prompt, prompt, [4, 2]]
        assert not any("opening" in row for row in rows)
