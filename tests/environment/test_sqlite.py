"""A database as a tool: reads, and does nothing else."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from proxima.data import FieldError
from proxima.environment.builtin import Sqlite
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.tool_calls import ToolCall
from tests.sandboxes import needs_bubblewrap

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
    "SELECT fts3_tokenizer('simple')": "not authorized",
    "SELECT FTS3_TOKENIZER('simple', x'4141414141414141')": "not authorized",
    "SELECT sqlite_version()": "not authorized",
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


SEARCHED = """
CREATE VIRTUAL TABLE new USING fts5(a, b);
INSERT INTO new VALUES ('red apple', 'x'), ('green pear', 'y');
CREATE VIRTUAL TABLE old USING fts4(a);
INSERT INTO old VALUES ('red apple'), ('green pear');
"""


def test_tables_of_full_text_can_be_searched(tmp_path):
    file = tmp_path / "searched.sql"
    file.write_text(SEARCHED)
    ask = Sqlite(script=str(file)).query
    marked = "SELECT highlight(new, 0, '[', ']') AS a FROM new WHERE new MATCH 'red' ORDER BY rank"
    assert ask(marked) == "a\n[red] apple"
    assert ask("SELECT snippet(old) AS a FROM old WHERE old MATCH 'pear'") == "a\ngreen <b>pear</b>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["printf('%.*c', 2147483647, 'x')", "instr(hex(zeroblob(500000)), hex(zeroblob(250000))||'1')"]
)
def test_one_long_call_of_a_function_ends_too(script, call):
    database = Sqlite(script=script, seconds=0.1)
    with pytest.raises(ValueError, match="the query was ended after 0.1 s"):
        database.query(f"SELECT length({call})")
    assert database.query("SELECT 1 AS one") == "one\n1"


@needs_bubblewrap
@pytest.mark.slow
def test_the_tool_runs_in_the_sandbox_of_episodes(script):
    spec = EnvironmentSpec(kind="sqlite", arguments={"script": script})
    with closing(Hosts(spec, workers=1, call_seconds=600.0, sandbox="bubblewrap")) as hosts:

        async def play():
            instance = await hosts.open({"messages": [{"role": "user", "content": "?"}]}, seed=1)
            (answer,) = await instance.call(
                [ToolCall(name="query", arguments={"sql": "SELECT count(*) AS c FROM city"})]
            )
            return answer.messages[0]["content"]

        assert asyncio.run(play()) == "c\n2"
