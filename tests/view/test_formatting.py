"""Numbers and foreign text as a person sees them."""

import math
from io import StringIO

import pytest

from proxima.view import formatting as n
from proxima.view.formatting import output_width
from proxima.view.terminal import table_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0404, "40 ms"),
        (0.0996, "0.1 s"),
        (4.06, "4.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (160, "2m 40s"),
        (3599.7, "1h 00m"),
        (3900, "1h 05m"),
        (86400 * 2 + 3 * 3600, "2d 03h"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_duration(seconds, text):
    assert n.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (290.4, "290 tok/s"),
        (1100, "1,100 tok/s"),
        (3.14, "3.1 tok/s"),
        (128_400, "128k tok/s"),
        (None, "– tok/s"),
        (0.0, "– tok/s"),
    ],
)
def test_rate(value, text):
    assert n.rate(value) == text


def test_the_others():
    assert [n.magnitude(v) for v in (134_515_008, 7.24e9, 812, 999_999, None)] == [
        "134.5 M",
        "7.2 B",
        "812",
        "1.0 M",
        "–",
    ]
    assert [n.percent(v) for v in (0.004, 1, None)] == ["0.4 %", "100.0 %", "– %"]
    assert [n.fixed(v) for v in (0.166, -0.004, -0.25, None)] == ["0.17", "0.00", "-0.25", "–"]
    assert [n.signed(v) for v in (0.815, -0.02, 0.0, -0.0001)] == ["+0.815", "−0.020", "+0.000", "+0.000"]
    assert [n.significant(v) for v in (0.00312, 1.236, 12_400, 3.1e-6, 1e-5, 0, 0.5)] == [
        "0.00312",
        "1.24",
        "12,400",
        "3.1e-6",
        "1e-5",
        "0",
        "0.5",
    ]
    assert n.count(2048) == "2,048"


def test_foreign_text_cannot_drive_the_terminal():
    text = n.printable("a\x1b[2J\x1b]0;title\x07\r\nb\tc\u202edcba\u2028\x9b31m\x7f")
    assert text == "a␛[2J␛]0;title␇␍⏎b c<202e>dcba<2028><009b>31m<007f>"
    assert n.printable("x" * 50, 10) == "x" * 9 + "…"
    assert n.printable("äß 日本 ½", 10) == "äß 日本 ½"


def test_visible_keeps_lines_and_shows_what_acts_unseen():
    assert n.visible("a\tb\nc é 👩‍🚀") == "a\tb\nc é 👩‍🚀"
    assert n.visible("\x1b[31m\x00\x7f\u202egpj\u2066") == "␛[31m␀<007f><202e>gpj<2066>"


def test_a_stream_without_an_encoding_is_written_to():
    class Writer:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    stream = Writer()
    n.write_safely(stream, "π\n")
    assert stream.text == "π\n"


def test_the_width_of_a_pipe_is_what_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"name": "x" * 30, "first": "y" * 20, "second": "z" * 40}]
    assert output_width(StringIO()) == 60
    assert max(map(len, table_text(rows, StringIO()).splitlines())) <= 60
    for unset in ("", "0", "wide"):
        monkeypatch.setenv("COLUMNS", unset)
        assert output_width(StringIO()) is None
        assert max(map(len, table_text(rows, StringIO()).splitlines())) > 90
