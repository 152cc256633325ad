"""Experts of tokens in Parquet: exact there and back, and in no file that needs none."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from proxima.data import Group
from proxima.runtime.state.pending_files import read_groups, write_groups
from proxima.runtime.state.rollouts import EVAL_SCHEMA, write_evals, write_rollouts
from proxima.runtime.state.stored_completions import stored_groups
from tests.runtime.state.test_rollouts import RECORDS, make_group


def routed(dtype) -> Group:
    group, draw = make_group(), np.random.default_rng(0)
    first, empty = group.completions
    ids = draw.integers(-1, 127, (3, 5, 2)).astype(dtype)
    own = replace(first, routed_experts=ids, prompt_routed_experts=ids[:, ::-1].copy())
    return replace(group, completions=(own, replace(empty, routed_experts=ids[:0])))


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_there_and_back(tmp_path, dtype):
    group, file = routed(dtype), tmp_path / "000001.parquet"
    write_rollouts(file, 1, [group], RECORDS)
    write_groups(tmp_path / "groups.parquet", [group])
    stored = [stored_groups(file)[0][0], read_groups(tmp_path / "groups.parquet")[0]]
    for read in stored:
        ids = read.completions[0].routed_experts
        assert ids.dtype == dtype and np.array_equal(ids, group.completions[0].routed_experts)
        assert np.array_equal(read.completions[0].prompt_routed_experts, group.completions[0].prompt_routed_experts)
        assert read.completions[1].routed_experts is None  # no token


def test_not_where_nothing_reads_them(tmp_path):
    write_evals(tmp_path / "evals.parquet", 1, [routed("int8")])
    assert set(pq.read_schema(tmp_path / "evals.parquet").names) == set(EVAL_SCHEMA.names)
    write_groups(tmp_path / "groups.parquet", [make_group()])
    assert not any("routed" in name for name in pq.read_schema(tmp_path / "groups.parquet").names)
