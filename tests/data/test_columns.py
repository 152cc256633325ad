"""The table of columns and the fields of the classes that carry them agree."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from proxima.data.columns import TOKEN_COLUMNS, Columns, ExpertIds, SamplingMask, column_dtypes, filled_by
from proxima.data.field_checks import tensor_hints
from proxima.data.flow import Completion
from proxima.data.packed_batch import PackedBatch
from proxima.data.policy_batch import PolicyBatch
from proxima.data.trajectory import Trajectory
from proxima.engine.http.dialect import Chunk
from proxima.engine.protocol import InFlight, ScoreRequest
from proxima.runtime.state.completion_columns import FIELDS
from proxima.training.batch_builder import CompletionRecord
from proxima.training.next_policy import NextLogProbs
from proxima.training.objectives.protocol import TokenStatistics

OF_A_CHAIN = {"newest", "first_log_prob", "bounded_steps"}  # of the cache alone
LAYOUT = {"predict", "target", "temperature"}  # of a packed batch: not columns of a token, but where it stands


@pytest.mark.parametrize("cls", [Completion, Trajectory, Chunk, InFlight, ScoreRequest, NextLogProbs])
def test_host_fields_have_the_dtypes_of_the_table(cls: type[Columns]) -> None:
    dtypes = {name: dtype for name, dtype in column_dtypes(cls).items() if name not in OF_A_CHAIN}
    assert dtypes == {name: np.dtype(TOKEN_COLUMNS[name].dtype) for name in dtypes}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in TOKEN_COLUMNS and f.name not in dtypes:
            column = TOKEN_COLUMNS[f.name]
            assert f.type == ((SamplingMask if column.ragged else ExpertIds) | None), f.name


@pytest.mark.parametrize("cls", [PackedBatch, PolicyBatch])
def test_tensors_have_the_kinds_and_axes_of_the_table(cls: type[Any]) -> None:
    hints = tensor_hints(cls)
    of_tokens = {name for name, hint in hints.items() if hint.split()[1] == "N"} - LAYOUT
    assert of_tokens <= set(TOKEN_COLUMNS)
    for name in of_tokens:
        assert hints[name] == TOKEN_COLUMNS[name].tensor, name


def test_a_packed_batch_carries_what_a_trajectory_has() -> None:
    hints = tensor_hints(PackedBatch)
    for f in fields(Trajectory):
        column = TOKEN_COLUMNS.get(f.name)
        if column is None or column.of_prompt or column.name == "tokens":  # `target`
            continue
        if column.ragged:
            assert (hints[f.name], hints[f"{f.name}_cu"]) == ("int M", "int N+1")
        else:
            assert hints[f.name] == column.tensor, f.name


def test_what_is_stored_has_a_source() -> None:
    """The engine's columns are fields of a completion, those of the trainer of its records."""
    sources = [("engine", Completion), ("episode", Completion), ("batch", Trajectory), ("forward", TokenStatistics)]
    for by, cls in sources:
        stored = {column.name for column in filled_by(by) if column.stored}
        assert stored and stored <= {f.name for f in fields(cls)}, by
    assert all(hasattr(CompletionRecord, column.name) for column in filled_by("advantage") if column.stored)
    assert {name for name, column in TOKEN_COLUMNS.items() if column.stored} <= set(FIELDS)
    required = {f.name for f in fields(Completion) if f.name in TOKEN_COLUMNS and f.default is f.default_factory}
    assert required == {column.name for column in filled_by("engine") if column.required}
