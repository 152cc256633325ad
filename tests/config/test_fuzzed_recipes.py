"""Whatever a recipe or an override says, the answer is a config or lines that a user can act on."""

import random
from functools import cache

import pytest

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.system.user_files import shipped_recipes
from tests.campaigns import campaign

VALUES = (
    *(
        "",
        "null",
        "~",
        "true",
        "0",
        "-1",
        "1",
        "1e308",
        "1e400",
        "-.inf",
        ".nan",
        "0x" + "f" * 5000,
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "9223372036854775808",
        "1e19",
        "007",
        "1_000",
        "x",
        "''",
        '"a\\0b"',
        '"\\ud800"',
        "²",
        "⅓",
        "é",
        "*x",
        "&x 1",
        "!!int 5",
    ),
    *('!!float "x"', "!!binary é", "!!python/name:os.system", "!x y", "!!timestamp x", "!!bool maybe", "!!set {a}"),
    *(
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "[" * 3000,
        "[" * 50 + "]" * 50,
        "{kind: 5}",
        "{kind: [a]}",
        "{kind: ''}",
        "{kind: a:b}",
    ),
    *("{kind: os:system}", "{kind: json:loads}", "[{kind: number, weight: x}]", "{? [a] : b}", "{a: 1, a: 2}", "<<: 1"),
    *(
        "2001-01-01",
        "12:30:45",
        "@",
        "%",
        "`",
        "- a",
        "a: b: c",
        "\t",
        "|",
        ">",
        "a\nb",
        "../..",
        "/dev/null",
        "~nobody/x",
    ),
    *(
        "x" * 5000,
        "{0: a}",
        "{1: a, 0: b}",
        "{-1: a}",
        "{null: a}",
        "{true: a}",
        "none",
        "default",
        "auto",
        "${x}",
        "{{ x }}",
    ),
)


@cache
def fields():
    """The dotted names of the quickstart's fields, of its sections and lists, and of what follows them."""
    names = [entry.path for entry in resolve("quickstart").entries]
    sections = {name.rpartition(".")[0] for name in names} - {""}
    others = (
        "extends",
        "reward.0",
        "reward.9999999999",
        "reward.²",
        "reward.-1",
        "nothing",
        "train.steps.x",
        "task.kind.kind",
    )
    return (*names, *sorted(sections), *others)


def refused_or_done(capsys, *words):
    code = main(["explain", *words])
    err = capsys.readouterr().err
    assert code in (0, 2) and "Traceback" not in err and "internal error" not in err, (words, code, err)
    assert code == 0 or (err.startswith("error: ") and len(err) < 20_000), (words, err)


SMALL = "tests/config/test_fuzzed_recipes.py::"


@pytest.mark.parametrize("seed", [0, *campaign(f"{SMALL}test_any_override[0]", range(1, 10))])
def test_any_override(capsys, monkeypatch, seed):
    """40 draws of one to three overrides: 400 in all."""
    monkeypatch.setenv("PROXIMA_DEBUG", "1")
    draw = random.Random(seed)
    for _ in range(40):
        words = [f"{draw.choice(fields())}={draw.choice(VALUES)}" for _ in range(draw.choice([1, 1, 2, 3]))]
        refused_or_done(capsys, "quickstart", *(word for word in words if "\0" not in word))


@cache
def recipes():
    return tuple(file.read_text(encoding="utf-8") for _, file in sorted(shipped_recipes().items()))


def mutated(text, draw):
    """A recipe with one to three changes, as bytes."""
    lines = text.splitlines()
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(lines))
        name, colon, _ = lines[at].partition(":")
        change = draw.randrange(7)
        if change == 0 and colon:
            lines[at] = f"{name}: {draw.choice(VALUES)}"
        elif change == 1:
            lines[at] = f"{' ' * draw.randrange(9)}{lines[at].strip()}"
        elif change == 2:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif change == 3:
            del lines[at]
            lines = lines or [""]
        elif change == 4 and colon:
            lines[at] = f"{draw.choice(VALUES)}: {draw.choice(VALUES)}"
        elif change == 5:
            lines[at : at + 1] = lines[at].split(" ", draw.randrange(1, 4))
        else:
            lines[at] = f"{draw.choice(fields()).rpartition('.')[2]}: {draw.choice(VALUES)}"
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        at = draw.randrange(len(content) + 1)
        content = (
            content[:at]
            + draw.choice([b"\xff", b"\0", b"\x1b[2J", b"\xed\xa0\x80", b"\r", b"\xef\xbb\xbf"])
            + content[at:]
        )
    return content


@pytest.mark.parametrize("seed", [0, *campaign(f"{SMALL}test_any_recipe[0]", range(1, 10))])
def test_any_recipe(capsys, monkeypatch, tmp_path, seed):
    """20 draws: 200 in all."""
    monkeypatch.setenv("PROXIMA_DEBUG", "1")
    draw = random.Random(seed)
    for number in range(20):
        file = tmp_path / f"{number}.yaml"
        file.write_bytes(mutated(draw.choice(recipes()), draw))
        refused_or_done(capsys, str(file))
