"""`proxima reward score`: rewards over a file of texts, what can be wrong with either, and what programs read."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from proxima.data.episode import Episode, Span
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.runtime.state.rollouts import read_rows, write_evals
from tests.reward.judge_stub import judge

pytestmark = pytest.mark.usefixtures("lent_servers")
ROWS = [
    {"question": "7 + 5?", "gold": "12", "difficulty": 1, "completion": "12"},
    {"question": "17 + 5?", "gold": "22", "difficulty": 2, "completion": "It is\n20."},
    {"question": "70 + 51?", "gold": "121", "difficulty": 3, "completion": ["121", "no idea"]},
]
REWARDS = """
def near(prompt: str, completion: str, gold, difficulty):
    if completion == "no idea": raise KeyError("number")
    return difficulty * 0.5
def right(completions, gold, **columns):
    return [None if text == "no idea" else float(text == answer) for text, answer in zip(completions, gold)]
def truth(prompt, completion, gold):
    return gold in completion.text
def typo(completion: str, gould): return 1.0
def wrong(prompt, completion): return gold in completion
def obj(prompt, completion): return "1" in completion
def answered(prompt, completion): return int(prompt.answer)
def same(completion: str): return 1
"""


def chat_cells(prompt, completion):
    """A CSV file with lists of messages as JSON texts."""
    cells = (json.dumps(cell).replace('"', '""') for cell in (prompt, completion))
    return "prompt,completion,answer\n" + ",".join(f'"{cell}"' for cell in cells) + ",2\n"


def write_scored(folder):
    """A file of completions, one that is cut off, one without a completion, and functions that score them."""
    (folder / "mine.py").write_text(REWARDS)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "cut.jsonl").write_text('{"prompt": "?", "completion": "a"}\n{"prompt": "?", "compl')
    (folder / "none.jsonl").write_text('{"prompt": "?", "completion": null}\n')
    return "a.jsonl"


@pytest.fixture
def file(here):
    return write_scored(here)


@pytest.mark.slow
def test_three_styles_in_a_table_and_a_failure_with_its_reason(proxima, file, here):
    names = ("near", "right", "truth")
    words = [word for name in names for word in ("--reward", f"./mine.py:{name}")]
    code, out, err = proxima("reward", "score", file, *words, "reward.1.weight=2", "--json-out", "out.json")
    assert code == 1 and err == (
        "NOTE without --model PATH, completion.tokens is empty\n"
        "NOTE prompt.answer is None; name the column of the answers with --answer COLUMN\n"
    )
    head, *table, blank, failure, summary = out.splitlines()
    assert head.split() == ["row", "reward", "correct", "near", "right", "truth", "completion"] and blank == ""
    assert [line.split() for line in table] == [
        ["0.0", "3.500", "yes", "0.500", "1.000", "1.000", "12"],
        ["1.0", "1.000", "no", "1.000", "0.000", "0.000", "It", "is⏎20."],
        ["2.0", "4.500", "yes", "1.500", "1.000", "1.000", "121"],
        ["2.1", "–", "no", "–", "–", "0.000", "no", "idea"],
    ]
    assert failure == "no score, 1×, first in row 2: near: KeyError: 'number' (mine.py:3)"
    assert summary == "4 completions, 1 without a score: reward 3 (sd 1.47, 1 … 4.5), 2 of 3 correct"
    facts = json.loads((here / "out.json").read_text())
    assert (facts["rewards"], facts["failed"], facts["mean"], facts["parts"]["right"]) == ([*names], 1, 3.0, 2 / 3)
    assert [(row["row"], row["sample"], row["value"]) for row in facts["rows"]] == [
        (0, 0, 3.5),
        (1, 0, 1.0),
        (2, 0, 4.5),
        (2, 1, None),
    ]


def test_kinds_recipes_and_parquet(done, proxima, file, here, recipe):
    rows = [{"prompt": [{"role": "user", "content": "?"}], "response": f"it is {i}", "answer": "2"} for i in range(4)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), here / "b.parquet")
    of_recipe = "reward 0.35 (sd 0.433, 0.1 … 1.1)"  # a tenth for the shape, which all have
    for reward, scores in (("number", "reward 0.25 (sd 0.433, 0 … 1)"), (recipe(), of_recipe)):
        code, out, _ = proxima("reward", "score", "b.parquet", "--reward", reward, "--rows", 1)
        assert code == 0 and out.splitlines()[2:] == [
            "… and 3 more; --rows 0 prints all",
            "",
            f"4 completions: {scores}, 1 of 4 correct",
        ]
    out = done("reward", "score", file, "--reward", "{kind: number, weight: 2}", "--answer", "gold")
    assert out.splitlines()[-1] == "4 completions: reward 1 (sd 1, 0 … 2), 2 of 4 correct"


def test_a_recipe_that_comes_with_proxima_goes_by_its_name(proxima, file, here):
    code, out, err = proxima("reward", "score", file, "--reward", "quickstart", "--answer", "gold")
    assert (code, err) == (0, "") and out.splitlines()[
        -1
    ] == "4 completions: reward 0.5 (sd 0.5, 0 … 1), 2 of 4 correct"
    (here / "math.yaml").write_text("reward: [{kind: length}]")  # a kind of reward is meant before a file
    assert (
        proxima("reward", "score", file, "--reward", "math", "--answer", "gold")[1].splitlines()[-1]
        == out.splitlines()[-1]
    )


def test_tokens_are_counted_by_a_model(done, file, tiny_model):
    out = done("reward", "score", file, "--reward", "{kind: length, tokens: 2}", "--model", tiny_model("llama"))
    assert [line.split()[1] for line in out.splitlines()[1:5]] == ["0.000", "-1.000", "-0.500", "-1.000"]


@pytest.mark.slow
def test_equal_scores_are_said(done, file):
    out = done("reward", "score", file, "--reward", "./mine.py:same")
    assert "NOTE every score is the same: completions of equal reward teach nothing" in out


@pytest.mark.slow
def test_an_object_that_is_taken_for_a_text_is_said(proxima, file):
    code, out, _ = proxima("reward", "score", file, "--reward", "./mine.py:obj")
    assert (
        code == 1
        and (
            "no score, 4×, first in row 0: obj: TypeError: argument of type 'Completion' is not iterable (mine.py:11) "
            "(completion is an object: write completion.text, or completion: str in the signature)"
        )
        in out
    )
    assert (
        "NameError: name 'gold' is not defined (mine.py:10)"
        in proxima("reward", "score", file, "--reward", "mine.py:wrong")[1]
    )


@pytest.mark.slow
def test_a_function_without_answers_is_told_how_to_get_them(proxima, file):
    code, out, err = proxima("reward", "score", file, "--reward", "./mine.py:answered")
    assert code == 1 and "NOTE prompt.answer is None; name the column of the answers with --answer COLUMN\n" in err
    assert "TypeError: int() argument must be" in out and "is an object" not in out
    code, _, err = proxima("reward", "score", file, "--reward", "./mine.py:answered", "--answer", "gold")
    assert code == 0 and "answer" not in err


def test_what_a_run_has_recorded(proxima, here):
    """Groups, answers, tokens and episodes as they were: an earlier path is no completion, a failure no reward of 0."""

    def completion(sample, text, tokens, **facts):
        spans = (
            Span(role="assistant", tokens=2, text="a call", sampled=True),
            Span(role="tool", tokens=tokens - 3, text="12"),
            Span(role="assistant", tokens=1, text=text, sampled=True, turn=1),
        )
        made = Completion.of_text(7, sample, text, range(tokens))
        own = np.array([True, True, *[False] * (tokens - 3), True])
        return replace(made, turn=1, sampled=own, episode=Episode(spans=spans, reward=0.5, forks=1, **facts))

    failed = replace(
        Completion.of_text(7, 2, "", ()), sampled=np.zeros(0, np.bool_), episode=Episode(failure="it fell")
    )
    completions = (completion(0, "12", 9), completion(1, "13", 6, cut="turns"), failed)
    prompt = Prompt(uid=7, messages=({"role": "user", "content": "7 + 5?"},), tokens=np.zeros(1, np.int32), answer="12")
    group = Group(prompt=prompt, completions=completions, scores=tuple(Score(value=0.0) for _ in completions))
    write_evals(here / "evals.parquet", 0, [group])
    rows = read_rows(here / "evals.parquet")
    earlier = {**rows[0], "turn": 0, "episode": json.dumps(json.loads(rows[0]["episode"]) | {"reward": None})}
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (earlier, *rows)))
    rewards = [word for entry in ("environment", "number", "{kind: length, tokens: 3}") for word in ("--reward", entry)]
    for file in ("evals.parquet", "rows.jsonl"):
        code, out, err = proxima("reward", "score", file, *rewards, "--json-out", "out.json")
        first, second, third = json.loads((here / "out.json").read_text())["rows"]
        assert (code, err, [row["sample"] for row in (first, second, third)]) == (1, "", [0, 1, 2]), out
        assert {row["row"] for row in (first, second, third)} == {first["row"]}  # one group
        assert (first["parts"]["environment"], first["parts"]["number"], second["parts"]["number"]) == (0.5, 1.0, 0.0)
        assert first["parts"]["length"] == second["parts"]["length"]  # observations don't count
        assert third["value"] is None and third["error"] == "it fell"


CHAT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
MESSAGES = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,completion,answer\n1 + 1?,2,2\n"),
        ("a.tsv", "prompt\tcompletion\tanswer\n1 + 1?\t2\t2\n"),
        ("a.csv.gz", "sep=;\nprompt;completion;answer\n1 + 1?;2;2\n"),
        ("a.json", json.dumps({"data": [{"prompt": "1 + 1?", "completion": "2", "answer": "2"}]})),
        ("shared.json", json.dumps([{"conversations": CHAT, "answer": "2"}])),
        ("chats.jsonl", json.dumps({"messages": MESSAGES, "answer": "2"})),
        ("trl.csv", chat_cells(MESSAGES[:1], MESSAGES[1:])),
    ],
)
def test_every_format_of_a_file_is_scored_alike(done, here, name, text):
    content = text.encode()
    (here / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert "1 completion: reward 1 (sd 0, 1 … 1), 1 of 1 correct" in done("reward", "score", name, "--reward", "exact")


def test_a_chat_that_ends_with_the_user_has_nothing_to_score(refusal, here):
    (here / "a.jsonl").write_text(json.dumps({"messages": MESSAGES[:1], "answer": "2"}))
    said = refusal("reward", "score", "a.jsonl", "--reward", "exact")
    assert "a.jsonl, row 0: column 'messages' ends with the user, so there is nothing to score" in said


def test_the_columns_are_those_of_the_recipes_task(proxima, here):
    """The file is like the training's: a question from two columns, and the answers in `gold`."""
    row = {"topic": "sums", "item": "7 + 5?", "gold": "12", "completion": ["12", "13"]}
    (here / "a.jsonl").write_text(json.dumps(row) + "\n")
    (here / "mine.py").write_text(
        "def asked(prompt, completion):\n"
        "    return float(prompt.question == 'sums: 7 + 5?' and completion.text == prompt.answer)\n"
    )
    recipe = "task: {kind: jsonl, path: train.jsonl, question: '{topic}: {item}', answer: gold}\n"
    (here / "r.yaml").write_text(recipe + "reward: {kind: function, path: 'mine.py:asked'}\n")
    code, _, said = proxima("reward", "score", "a.jsonl", "--reward", "r.yaml", "--json-out", "scores.json")
    assert code == 0, said
    assert [row["value"] for row in json.loads((here / "scores.json").read_text())["rows"]] == [1.0, 0.0]
    code, _, said = proxima("reward", "score", "a.jsonl", "--reward", "r.yaml", "--prompt", "topic")
    assert code == 0, said  # what is named on the command line comes first
    (here / "b.jsonl").write_text('{"question": "7 + 5?", "completion": "12"}\n')
    assert proxima("reward", "score", "b.jsonl", "--reward", "r.yaml")[0] == 0  # without these columns: the usual ones


# ---- agreement with labels -------------------------------------------------------------------------------------------


def labelled(here, *rows):
    (here / "l.jsonl").write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in rows))
    return "l.jsonl"


def test_scores_agree_with_labels_by_the_pairs_of_a_row(proxima, here):
    """The reward is the number of letters; of 4 pairs with different labels one is in their order, one is a tie."""
    (here / "mine.py").write_text(
        "def letters(completion: str, **columns):\n    assert 'human' not in columns\n    return len(completion)\n"
    )
    file = labelled(
        here,
        {"completion": ["a", "bb", "cc"], "human": [0, 1, 0]},
        {"completion": ["aaa", "b", "c"], "human": [1, 2, None]},
        {"completion": ["aaaa", "bb"], "human": [2.5, 3]},
    )
    words = ("reward", "score", file, "--reward", "./mine.py:letters", "--label", "human")
    code, out, _ = proxima(*words, "--json-out", "out.json")
    assert code == 0 and out.splitlines()[-1] == "agreement with 'human': 1.5 of 4 pairs in its order (0.375)"
    assert json.loads((here / "out.json").read_text())["agreement"]["ordered"] == 1.5


def test_verdicts_agree_with_labels_beyond_chance(proxima, here):
    """Of 4 answers the reward calls 1 right and people 2; by chance they would agree on 2."""
    texts, human = ["42", "forty", "41", "no"], [True, True, False, False]
    rows = ({"completion": text, "answer": "42", "human": label} for text, label in zip(texts, human, strict=True))
    code, out, _ = proxima("reward", "score", labelled(here, *rows), "--reward", "exact", "--label", "human")
    line = "agreement with 'human': 3 of 4 pairs in its order (0.750), 3 of 4 verdicts equal (kappa 0.50)"
    assert code == 0 and out.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"completion": "a"}, "l.jsonl, row 0 has no column 'human'; name one with --label; columns: "),
        ({"completion": ["a", "b"], "human": [1]}, "row 0: column 'human' has 1 labels for 2 completions"),
        ({"completion": "a", "human": "good"}, "row 0: column 'human' holds 'good', expected a number, true or false"),
    ],
)
def test_labels_that_can_not_be_read_are_one_line(proxima, here, row, line):
    code, _, err = proxima("reward", "score", labelled(here, row), "--reward", "length", "--label", "human")
    assert code == 2 and line in err and err.count("\n") == 1


def test_a_judge_is_compared_with_labels(proxima, here):
    rows = [{"completion": ["aaaa", "bbbb"], "human": [1, 0]}, {"completion": ["aabb", "aaab"], "human": [1, 0]}]
    with judge() as server:
        spec = json.dumps({"kind": "judge", "url": server.url, "model": "m", "compare": True})
        code, out, _ = proxima("reward", "score", labelled(here, *rows), "--reward", spec, "--label", "human")
    assert code == 0 and out.splitlines()[-1] == "agreement with 'human': 1 of 2 pairs in its order (0.500)"
