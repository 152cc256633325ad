"""The dtype of a served folder, where the command line leaves it to the machine."""

from contextlib import closing

import pytest

from proxima.model import precision
from proxima.model.precision import DtypeChoice
from proxima_tinker.request_log import RequestLog
from proxima_tinker.served_settings import Settings
from proxima_tinker.service import JOURNAL, with_dtype


@pytest.fixture
def slow(monkeypatch):
    """A processor without bfloat16 instructions."""
    monkeypatch.setattr(precision, "_measured", lambda: DtypeChoice("float32", "measured"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_keeps_its_dtype_on_another_processor(tmp_path, slow, dtype):
    with closing(RequestLog(tmp_path / JOURNAL, f"models/m in {dtype}")):
        pass
    lines = []
    settings = with_dtype(Settings("models/m", folder=tmp_path), lines.append)
    assert (settings.dtype, lines) == (dtype, [])


def test_a_new_folder_takes_the_faster_one_and_says_why(tmp_path, slow):
    lines = []
    assert with_dtype(Settings("models/m", folder=tmp_path), lines.append).dtype == "float32"
    assert lines == ["auto  --dtype float32: measured"]


def test_a_damaged_file_is_left_to_the_log_to_report(tmp_path, slow):
    (tmp_path / JOURNAL).write_bytes(b"no database")
    assert with_dtype(Settings("models/m", folder=tmp_path), print).dtype == "float32"


def test_a_dtype_that_is_named_is_taken(tmp_path):
    assert with_dtype(Settings("models/m", folder=tmp_path, dtype="bfloat16"), print).dtype == "bfloat16"
