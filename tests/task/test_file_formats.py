"""Every format of a local file gives the same rows through the same mapping of columns."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from proxima.data import FieldError, UserError
from proxima.prepare.read_files import inspect_file, iter_source_rows
from proxima.task import TASKS
from proxima.task.example_rows import LabelColumns, PairColumns, PreferenceReader
from proxima.task.file_formats import SUFFIXES, UNPACKED
from proxima.task.local_files import Csv, Files, Jsonl, Parquet
from tests.prepare.published import write_parquet
from tests.tiny import END, tiny_tokenizer

ROWS = [{"question": "2 + 5?", "answer": "07"}, {"question": 'A "b", c\nd é', "answer": "x;y"}]
CSV = 'question,answer\r\n2 + 5?,07\r\n\r\n"A ""b"", c\nd é",x;y\r\n'
TEXTS = {
    ".jsonl": "\n".join(map(json.dumps, ROWS)),
    ".ndjson": "\n".join(map(json.dumps, ROWS)) + "\n",
    ".json": json.dumps(ROWS, indent=1),
    ".csv": CSV,
    ".tsv": 'question\tanswer\n2 + 5?\t07\n"A ""b"", c\nd é"\tx;y\n',
}


def read(path, cls=Files, **fields):
    rows = cls(path=str(path), **fields).rows(0)
    return [(rows[i].messages[0]["content"], rows[i].answer) for i in range(len(rows))]


def written(folder, name, text):
    path = folder / name
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", sorted(TEXTS))
def test_all_formats_hold_the_same_rows(tmp_path, suffix, packed):
    path = written(tmp_path, f"data{suffix}{packed}", TEXTS[suffix])
    expected = [(row["question"], row["answer"]) for row in ROWS]
    for cls in (Files, Jsonl, Csv, Parquet):  # the file says what it is, not the kind
        assert read(path, cls) == expected
    assert Files(path=str(path)).columns() == ("question", "answer")


def test_every_suffix_is_tested_and_known():
    assert {*TEXTS, ".parquet"} == set(SUFFIXES)
    assert TASKS["files"] is Files and TASKS["csv"] is Csv


def test_files_of_several_formats_are_one_task(tmp_path):
    paths = [written(tmp_path, "a.csv", CSV), write_parquet(tmp_path / "b.parquet", ROWS)]
    paths.append(written(tmp_path, "c.json.gz", json.dumps(ROWS[0])))  # one object
    rows = Files(path=tuple(map(str, paths))).rows(0)
    assert [rows[i].answer for i in range(len(rows))] == ["07", "x;y", "07", "x;y", "07"]
    assert [rows.place(rows.items[i]).rpartition("/")[2] for i in range(5)] == [
        "a.csv:2",
        "a.csv:4",
        "b.parquet, row 0",
        "b.parquet, row 1",
        "c.json.gz, entry 0",
    ]


def test_the_content_tells_where_the_suffix_does_not(tmp_path):
    expected = [(row["question"], row["answer"]) for row in ROWS]
    assert read(written(tmp_path, "list.jsonl", TEXTS[".json"])) == expected
    assert read(written(tmp_path, "lines.json", TEXTS[".jsonl"])) == expected
    for name in ("rows", "rows.00001", "rows-of.part-2"):  # no suffix: the kind says it
        assert read(written(tmp_path, name, TEXTS[".jsonl"])) == expected
        assert read(written(tmp_path, name, CSV), Csv) == expected
    assert read(write_parquet(tmp_path / "table", ROWS)) == expected
    assert read(write_parquet(tmp_path / "table.pq", ROWS)) == expected
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(TEXTS[".jsonl"].encode()))
    assert read(tmp_path / "packed.jsonl") == expected


@pytest.mark.parametrize("cls", [Files, Jsonl, Csv, Parquet])
@pytest.mark.parametrize("name", ["a.txt", "a.db", "a.avro", "a.XLSX", "a.data", "a.txt.gz"])
def test_the_suffix_of_another_format_is_refused(tmp_path, cls, name):
    known = r"is none of \.parquet, .*, \.tsv, possibly with \.gz; (convert it|save it|export)"
    with pytest.raises(UserError, match=known) as caught:
        cls(path=str(written(tmp_path, name, TEXTS[".jsonl"]))).rows(0)
    assert "JSON:" not in str(caught.value) and "\n" not in str(caught.value)


def test_csv_as_spreadsheets_write_it(tmp_path):
    semicolons = "\ufeffquestion;answer\nIs it 1,5?;7\n"
    assert read(written(tmp_path, "excel.csv", semicolons)) == [("Is it 1,5?", "7")]
    indexed = ',question,answer\n0,Q,"1,000"\n'  # as pandas writes it
    rows = Csv(path=str(written(tmp_path, "pandas.csv", indexed))).rows(0)
    assert rows[0].answer == "1,000" and rows[0].metadata == {"column 1": "0", "question": "Q", "answer": "1,000"}
    long = "x" * 200_000
    assert read(written(tmp_path, "long.csv", f"question,answer\n{long},1\n")) == [(long, "1")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("excel.csv", "sep=;\nquestion;answer\nIs it 1,5?;7\n"),
        ("tabs.csv", "SEP=\t\r\nquestion\tanswer\r\nIs it 1,5?\t7\r\n"),
        ("pipes.csv", "question|answer\nIs it 1,5?|7\n"),
        ("commas.csv", 'question;answer;"notes, if any";level\nIs it 1,5?;7;;1\n'),
        ("names.csv", 'question,answer,notes (a;b;c;d)\n"Is it 1,5?",7,\n'),
        ("most.csv", "question;answer;from, to;level\nIs it 1,5?;7;;1\n"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_delimiter_is_told_by_the_header(tmp_path, name, text, encoding):
    assert read(written(tmp_path, name, text.encode(encoding))) == [("Is it 1,5?", "7")]
    if text.lower().startswith("sep="):
        with pytest.raises(UserError, match=f"{name}:4 has 1 cells"):
            read(written(tmp_path, name, (text + "alone\n").encode(encoding)))


@pytest.mark.parametrize("suffix", [*sorted(TEXTS), ".csv.gz"])
def test_utf_16_with_a_mark_is_read_in_every_format_of_text(tmp_path, suffix):
    text = TEXTS[suffix.removesuffix(".gz")]
    expected = [(row["question"], row["answer"]) for row in ROWS]
    assert read(written(tmp_path, f"data{suffix}", text.encode("utf-16"))) == expected
    with pytest.raises(UserError, match=r"is not UTF-8: .*iconv -f utf-16le -t utf-8"):
        read(written(tmp_path, f"bare{suffix}", text.encode("utf-16-le")))
    with pytest.raises(UserError, match=r"begins as UTF-16, and is not"):
        read(written(tmp_path, f"torn{suffix}", text.encode("utf-16")[:-1]))


@pytest.mark.parametrize("key", ["data", "rows", "examples", "instances"])
def test_rows_below_a_key_of_a_json_document(tmp_path, key):
    expected = [(row["question"], row["answer"]) for row in ROWS]
    document = json.dumps({"version": "1.1", key: ROWS}, indent=1)
    assert read(written(tmp_path, "a.json", document)) == expected
    assert read(written(tmp_path, "b.json.gz", document)) == expected
    one = json.dumps({"question": "Q", "answer": "1", key: ["a", "b"]})  # a row with a list
    assert read(written(tmp_path, "c.json", one)) == [("Q", "1")]
    few = json.dumps({"question": "Q", "answer": "1", key: [{"in": "a"}]})  # a row with a list of objects
    assert read(written(tmp_path, "few.json", few)) == [("Q", "1")]
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    assert read(written(tmp_path, "d.json", chat), messages="messages") == [("Hi", None)]


def test_an_empty_cell_is_null(tmp_path):
    alpaca = "instruction,input,output\nAdd.,1 + 1,2\nGreet.,,Hi\n"
    path = written(tmp_path, "alpaca.csv", alpaca)
    assert read(path, question="{instruction}\n{input}", answer="output") == [("Add.\n1 + 1", "2"), ("Greet.\n", "Hi")]
    assert read(written(tmp_path, "none.csv", "question,answer\nQ,\n")) == [("Q", None)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question,answer\nQ,1\nQ,1,2\n", r"a.csv:3 has 3 cells, and the header has 2 columns; quote a cell"),
        ("a.csv", 'question,answer\nQ,1\n"Q,2\nR,3\n', r"a.csv:3 is not CSV: .*close the quote"),
        ("a.csv", "question,question\nQ,1\n", r"a.csv:1 has two columns 'question'; rename one; if the first line is"),
        (
            "a.csv",
            "What is 1 + 1?,2\nWhat is 2 + 2?,4\n",
            r"columns: What is 1 \+ 1\?, 2; if the first line is data, add",
        ),
        ("a.csv", "question,answer\nQ,1\ncaf\xe9,2\n".encode("latin1"), r"a.csv:3 is not UTF-8.*iconv -f latin1"),
        ("a.csv", "query,answer\nQ,1\n", r"question='question' names no column: .*a.csv:2.*; columns: query, answer"),
        ("a.csv", "question,answer\n", r"path='.*a.csv' holds no rows"),
        ("a.json", '[{"question": "Q"}, 7]', r"a.json: entry 1 is a number, expected objects"),
        ("a.jsonl.gz", '{"question": "Q", "answer": "1"}\n{"question', r"a.jsonl.gz:2 is not JSON"),
        ("a.csv", "instruction,input,output\nA,b,c\n", r'set question="{instruction}\\n{input}" and answer=output'),
        ("a.jsonl", '{"conversations": []}', r"set messages=conversations for a column of chats"),
        ("a.xlsx", "PK", r"a.xlsx is none of .parquet, .jsonl.*; save it as CSV"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_what_to_do(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        Files(path=str(written(tmp_path, name, content))).rows(0)
    assert "\n" not in str(caught.value)


def parquet_of(folder, *, names=("question", "answer"), rows=5000, broken=None, **options):
    """A Parquet file of texts; `broken` is a row whose question is not UTF-8."""
    texts = [f"What is {i} + 1?".encode() for i in range(rows)]
    if broken is not None:
        texts[broken] = b"caf\xe9"
    questions = pa.array(texts, pa.binary()).view(pa.string())
    table = pa.Table.from_arrays([questions, pa.array([str(i + 1) for i in range(rows)])], names=list(names))
    parquet.write_table(table, folder / "a.parquet", **options)
    return folder / "a.parquet"


def source_rows(path):
    return list(iter_source_rows([inspect_file(path, path.name)]))


@pytest.mark.parametrize("use", [read, source_rows])
@pytest.mark.parametrize("broken", [0, 4321])
def test_a_text_of_parquet_that_is_not_utf_8_is_named_with_its_row(tmp_path, use, broken):
    path = parquet_of(tmp_path, broken=broken)
    with pytest.raises(
        UserError, match=f"a.parquet, row {broken} can't be read as Parquet: a text is not UTF-8"
    ) as caught:
        use(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("use", [read, source_rows, lambda path: Files(path=str(path)).columns()])
def test_two_columns_of_parquet_with_one_name(tmp_path, use):
    with pytest.raises(UserError, match=r"a.parquet has two columns 'question'; rename one of them"):
        use(parquet_of(tmp_path, names=("question", "question")))


@pytest.mark.parametrize("use", [read, source_rows])
def test_a_damaged_page_of_parquet_is_named_with_the_last_row_before_it(tmp_path, use):
    path = parquet_of(tmp_path, row_group_size=2048, use_dictionary=False, compression="zstd")
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 60 : start + 200] = bytes(140)
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"a.parquet, after row 4095, can't be read as Parquet: .*: is it truncated"
    ) as caught:
        use(path)
    assert "\n" not in str(caught.value)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"a.parquet can't be read as Parquet"):
        use(path)


@pytest.mark.parametrize("suffix", sorted(UNPACKED))
def test_another_compression_names_the_command(tmp_path, suffix):
    with pytest.raises(UserError, match=f"unpack it: {UNPACKED[suffix]} .*a.jsonl{suffix}"):
        Files(path=str(written(tmp_path, f"a.jsonl{suffix}", b"?"))).rows(0)


def test_a_torn_gzip_file(tmp_path):
    path = written(tmp_path, "a.jsonl.gz", "\n".join(map(json.dumps, ROWS)))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match=r"a.jsonl.gz can't be unpacked: .*; is it truncated\?"):
        Files(path=str(path)).rows(0)


def test_json_in_cells(tmp_path):
    chat = json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}])
    cells = [["conversations", "answer"], [chat, json.dumps(["Austen", "Jane Austen"])]]
    text = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells)
    path = written(tmp_path, "chats.csv", text)
    rows = Csv(path=str(path), messages="conversations", json_columns=["answer"]).rows(0)
    assert rows[0].answer == ["Austen", "Jane Austen"] == rows[0].metadata["answer"]
    assert [message["role"] for message in rows[0].messages] == ["user", "assistant"]
    assert isinstance(Csv(path=str(path), messages="conversations").rows(0)[0].answer, str)
    with pytest.raises(UserError, match="chats.csv:2: column 'note' should be JSON"):
        bad = written(tmp_path, "chats.csv", "question,note\nQ,[1\n")
        Csv(path=str(bad), json_columns=["note"]).rows(0)
    with pytest.raises(FieldError, match=r"json_columns=.*has no column 'tags'"):
        Csv(path=str(bad), json_columns=["tags"]).rows(0)


def test_pairs_and_labels_of_csv(tmp_path):
    reader = PreferenceReader(tokenizer=tiny_tokenizer(), context=256)
    text = "question,chosen,rejected,margin,completion,label\nQ,good,bad,0.5,A,true\nQ,good,bad,1,A,0\n"
    rows = Csv(path=str(written(tmp_path, "pairs.csv", text))).rows(0)
    assert reader.pair(0, rows[0], PairColumns(margin="margin")).margin == 0.5
    assert [reader.labeled(i, rows[i], LabelColumns()).good for i in range(2)] == [True, False]
    chat = '"[{""role"": ""assistant"", ""content"": ""good""}]"'
    path = written(tmp_path, "chats.csv", f"question,chosen,rejected\nQ,{chat},bad\n")
    with pytest.raises(FieldError, match="holds a list of messages as JSON text") as caught:
        reader.pair(0, Csv(path=str(path)).rows(0)[0], PairColumns())
    assert "task.json_columns=[chosen]" in caught.value.remedy
    read_as_json = Csv(path=str(path), json_columns=["chosen"]).rows(0)[0]
    assert tiny_tokenizer().decode(reader.pair(0, read_as_json, PairColumns()).chosen.tokens) == f"good{END}"
