"""Written values become values of the annotated type, or the line that says what would do."""

import pytest

from proxima.config import ConfigError, resolve

EVERYTHING = "tests.config.fakes:Everything"


def spec(recipe, *overrides):
    return resolve(recipe(), [f"task.kind={EVERYTHING}", *overrides]).config.task


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("flag=true", True),
        ("count=1e3", 1000),
        ("count=7.0", 7),
        ("ratio=2", 2.0),
        ("ratio=1e-5", 1e-5),
        ("ratio=.inf", float("inf")),
        ("name=12", "12"),
        ("name=true", "true"),
        ("name=1e-5", "1e-5"),
        ("name=Reply with: only", "Reply with: only"),
        ("name=[x", "[x"),
        ("choice=b", "b"),
        ("choice=3", 3),
        ("choice=null", None),
        ("pair=[2, 3]", (2, "3")),
        ("pair=[2, 'y']", (2, "y")),
        ("many=[1, 2e-1]", (1.0, 0.2)),
        ("many=[]", ()),
        ("table={a: 1, b: 2}", {"a": 1, "b": 2}),
        ("table.a=1", {"a": 1}),
        ("either=2", 2.0),
        ("either=word", "word"),
        ("anything={a: [1, 1e-5]}", {"a": [1, 1e-5]}),
    ],
)
def test_accepted(recipe, text, value):
    name = text.partition("=")[0].partition(".")[0]
    values = getattr(spec(recipe, f"task.{text}"), name)
    assert values == value
    assert type(values) is type(value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("flag=yes", "task.flag=yes (command line): must be true or false"),
        ("flag=1", "task.flag=1 (command line): must be true or false"),
        ("count=1.5", "task.count=1.5 (command line): must be a whole number"),
        ("count=ten", "task.count=ten (command line): must be a whole number"),
        ("count=true", "task.count=true (command line): must be a whole number"),
        ("count=", "task.count= (command line): must be a whole number; leave it out for 1"),
        ("count=.inf", "task.count=.inf (command line): must be a whole number"),
        ("ratio=true", "task.ratio=true (command line): must be a number"),
        ("ratio=[1]", "task.ratio=[1] (command line): must be a number"),
        ("name=null", "task.name=null (command line): must be a text; leave it out for x"),
        ("choice=c", "task.choice=c (command line): must be one of a, b, 3 or null"),
        ("pair=[1]", "task.pair=[1] (command line): must be a list of 2"),
        ("many=3", "task.many=3 (command line): must be a list: [3]"),
        ("many=", "task.many= (command line): must be a list: […]; leave it out for []"),
        ("many=[1, x]", "task.many.1=x (command line): must be a number"),
        ("table=[1]", "task.table=[1] (command line): must be a mapping: {name: value, …}"),
        ("table={a: x}", "task.table.a=x (command line): must be a whole number"),
        ("count=-1", "task.count=-1 (command line): must be > 0"),
    ],
)
def test_refused(recipe, text, line):
    with pytest.raises(ConfigError) as error:
        spec(recipe, f"task.{text}")
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("", "must be a list: […] or a text; leave it out for http://127.0.0.1:8000"),
        ("[]", "must name a server; give its address, http://HOST:PORT"),
    ],
)
def test_no_address_of_a_server(recipe, written, line):
    with pytest.raises(ConfigError) as error:
        resolve(recipe(), ["engine=vllm", f"engine.url={written}"])
    assert str(error.value) == f"engine.url={written} (command line): {line}"


def test_a_text_in_a_file_that_looks_like_a_number_wants_quotes(recipe):
    with pytest.raises(ConfigError) as error:
        resolve(recipe(f"model: {{path: 12}}\ntask: {EVERYTHING}\nreward: number\nalgorithm: cppo\n"))
    assert str(error.value) == 'model.path=12 (run.yaml:1): must be a text; put it in quotes: "12"'


def test_a_specs_own_words_get_the_path(recipe):
    with pytest.raises(ConfigError) as error:
        spec(recipe, "task.name=bad")
    assert str(error.value) == "task (command line): the name is bad; take another"
