"""A database as a tool: reads, and does nothing else."""

import sqlite3

import pytest

from proxima.data import FieldError
from proxima.environment.builtin import Sqlite

SCRIPT = """
CREATE TABLE city (name TEXT, people INTEGER, area REAL, flag BLOB);
INSERT INTO city VALUES ('Bern', 134000, 51.6, x'00ff'), ('Zürich', 421000, NULL, NULL);
CREATE TABLE number (n INTEGER);
INSERT INTO number WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 100) SELECT n FROM c;
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "cities.sql"
    file.write_text(SCRIPT)
    return str(file)


def test_queries(script):
    ask = Sqlite(script=script, rows=3).query
    assert ask("SELECT name, people FROM city ORDER BY people DESC") == "name | people\nZürich | 421000\nBern | 134000"
    assert ask("SELECT area, flag FROM city") == "area | flag\n51.6 | (2 bytes)\nNULL | NULL"
    assert ask("SELECT n FROM number") == "n\n1\n2\n3\n(more rows)"
    assert ask("SELECT n FROM number WHERE n > 100") == "n\n(no rows)"
    assert "CREATE TABLE city" in ask("SELECT sql FROM sqlite_master")
    assert "people" in ask("PRAGMA table_info(city)")
    assert ask("SELECT upper(name) FROM city LIMIT 1") == "upper(name)\nBERN"
    assert len(ask("SELECT group_concat(n, ',') FROM number")) < 300


WRITES = ("INSERT INTO number VALUES (1)", "DELETE FROM number", "DROP TABLE number", "CREATE TEMP TABLE x (a)")
REFUSED = {
    **dict.fromkeys((*WRITES, "ATTACH 'other.db' AS other", "PRAGMA journal_mode", "BEGIN"), "not authorized"),
    "VACUUM INTO 'copy.db'": "denied",
    "SELECT load_extension('x')": "not authorized|no such function",
    "SELECT random()": "not authorized",
    "SELECT zeroblob(1000000000)": "too big",
    "SELECT * FROM nowhere": "no such table",
    "SELECT 1; SELECT 2": "one statement",
    "SELECT": "incomplete|syntax",
    "SELECT '\0'": "null character|unrecognized",
}


@pytest.mark.parametrize("sql", REFUSED)
def test_what_is_refused(script, sql):
    with pytest.raises(ValueError, match=REFUSED[sql]):
        Sqlite(script=script).query(sql)


@pytest.mark.slow
def test_an_endless_query_ends(script):
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    database = Sqlite(script=script, seconds=0.1)
    with pytest.raises(ValueError, match="the query was ended after 0.1 s"):
        database.query(endless)
    assert database.query("SELECT 1 AS one") == "one\n1"


def test_a_file_is_not_changed(tmp_path):
    file = tmp_path / "cities.db"
    with sqlite3.connect(file) as made:
        made.executescript(SCRIPT)
    made.close()
    before = file.read_bytes()
    database = Sqlite(file=str(file))
    assert database.query("SELECT count(*) AS c FROM city") == "c\n2"
    with pytest.raises(ValueError, match="not authorized"):
        database.query("DELETE FROM city")
    assert file.read_bytes() == before


def test_bad_arguments(tmp_path, script):
    (tmp_path / "no.db").write_text("no database, but long enough to be taken for one " * 20)
    for arguments, message in [
        ({}, "must be given, or script"),
        ({"script": script, "file": script}, "must be given, or script: one of the two"),
        ({"script": "none.sql"}, "script='none.sql' does not exist"),
        ({"file": str(tmp_path / "no.db")}, "can't be read as a database: file is not a database"),
        ({"script": str(tmp_path / "no.db")}, "can't be read as a database: near"),
        ({"script": script, "rows": 0}, "rows=0 must be >= 1"),
        ({"script": script, "seconds": 0}, "seconds=0 must be > 0"),
    ]:
        with pytest.raises(FieldError, match=message):
            Sqlite(**arguments)
