"""What can be wrong with a reward in a recipe, as a user types it: one line with the remedy, exit 2, no weights
read."""

import json
import socket

import pytest

from proxima.config import resolve
from proxima.config.validate import warnings


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Whoever reads weights before refusing has failed."""

    def read(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("proxima.model.model_source.load", read)


CASES = [
    ("reward={kind: overlong, max_tokens: 8}", "buffer_tokens", "is missing: tokens before"),
    ("reward={kind: overlong, max_tokens: 8, buffer_tokens: 9}", "buffer_tokens", "must be in [1, max_tokens=8]"),
    (
        "reward={kind: overlong, max_tokens: 8, buffer_tokens: 2, factor: -1}",
        "factor",
        "must be >= 0 and finite; it is subtracted",
    ),
    ("reward={kind: repetition, n: 0}", "n", "must be >= 1"),
    ("reward={kind: repetition, unit: letters}", "unit", "words"),
    ("reward={kind: accuracy_1_5_2, tag: 'a b'}", "tag", "must be a plain name such as 'answer'"),
    ("reward={kind: diversity, n: 0}", "n", "must be >= 1"),
    ("reward={kind: http}", "http", "url"),
    ("reward={kind: http, url: 'localhost:80'}", "url", "must be an address such as http://localhost:8000/score"),
    ("reward={kind: http, url: 'http://h/', max_concurrent: 0}", "max_concurrent", "must be >= 1"),
    (
        "reward={kind: http, url: 'http://h/', token_env: NO_SUCH}",
        "token_env",
        "must name an environment variable that is set",
    ),
    ("reward={kind: function_batch, path: 'tests.reward.make:evry_text'}", "path", "did you mean 'every_text'?"),
    ("reward=overlogn", "overlogn", "did you mean 'overlong'?"),
    ("reward={kind: repetition, max_penlty: 1}", "max_penlty", "did you mean 'max_penalty'?"),
    ("data.max_unreadable=2", "data.max_unreadable=2", "must be a share in [0, 1]; 1 never refuses"),
    ("data.check_answers=-1", "data.check_answers=-1", "must be >= 0; 0 reads all"),
]


@pytest.mark.parametrize(("override", "field", "remedy"), CASES, ids=[case[0] for case in CASES])
def test_refused_in_one_line(proxima, recipe, here, override, field, remedy):
    code, out, err = proxima("train", recipe(), override, "folder=run")
    assert (code, out) == (2, "") and err.startswith("error: ") and len(err.splitlines()) == 1, err
    assert field in err and remedy in err, err
    assert not (here / "run").exists()


def test_answers_that_no_reward_reads(proxima, recipe, here):
    (here / "q.jsonl").write_text(
        "".join(json.dumps({"question": "?", "answer": answer}) + "\n" for answer in ("1", "two", "3"))
    )
    code, out, err = proxima("train", recipe(), "task={kind: jsonl, path: q.jsonl}", "folder=run")
    assert code == 2 and out.endswith("  checking recipe and data\n") and not (here / "run").exists()
    assert err == (
        "error: data.max_unreadable=0.01 (default): is exceeded: task: 1 of 3 answers can't be read: "
        "row 1 \"two\" (number: not a number; use 'exact' or 'math'); "
        "repair or remove these rows, use a reward that reads them, or raise data.max_unreadable\n"
    )


def test_a_scorer_that_is_not_there(proxima, recipe, here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        code, out, err = proxima("train", recipe(), f"reward={{kind: http, url: '{url}', retries: 0}}", "folder=run")
    assert code == 2 and out.endswith("  checking recipe and data\n") and not (here / "run").exists()
    assert err == f"error: reward 'http': {url} can't be reached: Connection refused; start the scorer before the run\n"


def test_a_penalty_that_is_never_due_is_said(recipe):
    """The tiny recipe's completions have at most 4 tokens."""
    for limit, message in ((4, []), (7, []), (8, ["reward.0.max_tokens=8 "])):
        resolved = resolve(recipe(), [f"reward={{kind: overlong, max_tokens: {limit}, buffer_tokens: 4}}"])
        said = [str(problem) for problem in warnings(resolved) if "never reached" in str(problem)]
        assert [line[: len("reward.0.max_tokens=8 ")] for line in said] == message


def test_all_kinds_are_listed_with_a_sentence(proxima):
    code, out, _ = proxima("list", "reward")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 0
    for kind in ("accuracy_1_5_2", "diversity", "function_batch", "http", "overlong", "repetition"):
        assert kind in lines
