"""`make docs`: pages and figures generated from the code.

    docs/reference.md, recipes/schema.json       from the schema and the tables
    docs/algorithms/, peers.md of the peers      from the specs and docs/algorithms/notes.yaml, see method_pages.py
    metric tables of docs/*.md                   from src/proxima/view/microscope/metrics.yaml
    columns of tokens in docs/run_folder.md      from src/proxima/data/columns.py
    docs/learning_curve.svg                      from the demo's run
    docs/first_screen.svg                        from the learning curve, see first_screen.py

python scripts/make_docs.py [--check]        --check: write nothing; exit 1 if a page is out of date
"""

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
REFERENCE = REPOSITORY / "docs" / "reference.md"
CURVE = REPOSITORY / "docs" / "learning_curve.svg"
DEMO = REPOSITORY / "runs" / "quickstart"

METRICS = {  # page: the groups of metrics.yaml in its table; run_folder.md has the others
    "mismatch.md": ["Engine against trainer"],
    "ppo.md": ["Critic"],
    "models.md": ["Experts"],
    "run_folder.md": [],
}
MADE = "<!-- `make docs` makes this table from src/proxima/view/microscope/metrics.yaml -->"

MADE_OF_RANGES = "<!-- `make docs` makes this table from src/proxima/core/correction/health.py -->"

MADE_OF_COLUMNS = "<!-- `make docs` makes this table from src/proxima/data/columns.py -->"

SEE_BELOW = "see below"
ALIKE = 4  # a kind refers to another with the same fields if more than so many have the same defaults
# slots of a preset with the default of `algorithm`
RATE = r"rate: [\d.]+"
DEFAULTS = r"proximal: behavior, |advantage: {kind: grpo, scale: none}, |, aggregate: {kind: token_mean}(?=})"

HEAD = """\
# Reference

Every field of a recipe and every kind in every slot, generated from the code by `make docs`. `proxima list SLOT`
prints the same in a terminal, and `recipes/schema.json` completes it in an editor.

A slot takes `{kind: NAME, field: value}` or, with the defaults, `NAME`; `package.module:Class` names a class of yours.
"""


def reference() -> str:
    """Return the text of docs/reference.md."""
    from proxima.config.families import OFFLINE
    from proxima.config.json_schema import catalogue
    from proxima.config.schema import RunConfig

    parts = [HEAD, "## Fields\n"]
    listed = {"proxima train": list(fields_below(RunConfig, ""))}
    parts += [f"{text}\n" for text in tables_of(listed["proxima train"])]
    for family in OFFLINE:
        parts.append(f"## Fields of {family.name} recipes\n")
        rows: list[tuple[str, Row]] = []
        alike: dict[str, list[str]] = {name: [] for name in listed}
        for section, row in fields_below(family.root, ""):
            first = next((name for name in reversed(listed) if (section, row) in listed[name]), None)
            if first is None:
                rows.append((section if section == family.own else f"{family.name}: {section}", row))
            elif row[1] != SEE_BELOW:
                alike[first].append(row[0])
        parts += [
            f"As for {name}: {', '.join(in_short(same, listed[name]))}.\n" for name, same in alike.items() if same
        ]
        parts += [f"{text}\n" for text in tables_of(rows)]
        listed[family.name] = list(fields_below(family.root, ""))
    parts.append("## Kinds\n")
    parts += [f"{text}\n" for text in slots_in_words(catalogue())]
    return "\n".join(parts)


def slots_in_words(slots: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the section of each slot: what several of its kinds have in common, then its kinds. A slot whose kinds all
    stand in the section of another slot has no table of its own."""
    for name, slot in sorted(slots.items()):
        kinds = slot["kinds"]
        head = f"### {name}\n\n`{'`, `'.join(slot['paths'])}`: {slot['meaning']}\n"
        holder = next((other for other in sorted(slots) if holds(slots, other, name)), None)
        if holder is not None:
            absent = [f"`{kind}`" for kind in slots[holder]["kinds"] if kind not in kinds]
            but = f", but {', '.join(absent)}" if absent else ""
            yield f"{head}\nThe kinds of [{holder}](#{holder}){but}.\n"
            continue
        if any(facts["fields"] for facts in kinds.values()):
            yield f"{head}\n{kinds_in_words(kinds)}"
            continue
        rows = [[f"`{kind}`", facts["summary"]] for kind, facts in kinds.items()]
        if name == "algorithm":
            head, rows = f"{head}\nA slot that is not shown has its default.\n", presets_in_words(rows)
        yield f"{head}\n{table(['kind', 'what it is'], rows)}"


def kinds_in_words(kinds: dict[str, dict[str, Any]]) -> str:
    """Return a table of the fields that several kinds have, if there are any, and a table of the kinds."""
    counts = Counter((name, fact["help"]) for facts in kinds.values() for name, fact in facts["fields"].items())
    common: dict[tuple[str, str], str | None] = {
        field: None for field, count in counts.items() if count > 1 and field[1]
    }
    for name, meaning in common:
        defaults = {value_of(facts["fields"][name]) for facts in kinds.values() if name in facts["fields"]}
        if counts[name, meaning] == len(kinds) and len(defaults) == 1:
            common[name, meaning] = defaults.pop()  # the same field of every kind, shown here alone
    text = ""
    if common:
        rows = [[f"`{name}`" + (f" {all_have}, in all" if all_have else ""), meaning]
                for (name, meaning), all_have in common.items()]  # fmt: skip
        text = f"{table(['field of several kinds', 'meaning'], rows)}\n\n"
    rows, listed = [], dict[str, dict[str, str]]()
    for kind, facts in kinds.items():
        given = {name: fact for name, fact in facts["fields"].items() if not common.get((name, fact["help"]))}
        own, others = fields_in_words(given, common)
        listed[kind] = others
        alike = next(other for other, fields in listed.items() if [*fields] == [*others])
        differ = {name: value for name, value in others.items() if value != listed[alike][name]}
        refers = alike != kind and len(others) - len(differ) > ALIKE
        shown = [f"`{name}` {value}" for name, value in (differ if refers else others).items()]
        shown += [f"the others as `{alike}`"] if refers else []
        rows.append([f"`{kind}`", facts["summary"], "<br>".join(filter(None, [*own, ", ".join(shown)]))])
    return text + table(["kind", "what it is", "fields"], rows)


def presets_in_words(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return (preset, what it sets): without defaults, and of presets that differ in a rate only the first whole."""
    first: dict[str, str] = {}
    shown = []
    for kind, meaning in rows:
        note, _, values = re.sub(DEFAULTS, "", meaning).partition("{")
        rate = re.search(RATE, values)
        alike = first.setdefault(re.sub(RATE, "", values), kind)
        same = rate is not None and alike != kind
        shown.append([kind, note + (f"As {alike}, with {rate[0]}" if same else f"{{{values}")])
    return shown


def holds(slots: dict[str, dict[str, Any]], other: str, name: str) -> bool:
    """Whether another slot has each kind of this one, with the same fields; of two alike slots the first by name."""
    kinds, others = slots[name]["kinds"], slots[other]["kinds"]
    alike = all(others.get(kind) == facts for kind, facts in kinds.items())
    return other != name and alike and (len(others), name) > (len(kinds), other)


Row = tuple[str, str, str]  # the field, its default, its meaning


def fields_below(cls: type, path: str) -> Iterator[tuple[str, Row]]:
    """Yield (section, row) for each field of a config class, and then of the classes below it."""
    from proxima.config.describe import fields_of

    below = []
    for info in fields_of(cls):
        if info.section is not None:
            below.append((info.section, f"{path}{info.name}."))
        yield path.removesuffix(".") or "a recipe", (f"`{path}{info.name}`", default_of(info), info.help)
    for inner, name in below:
        yield from fields_below(inner, name)


def in_short(fields: Sequence[str], of: Sequence[tuple[str, Row]]) -> list[str]:
    """Return names of fields of a family; a section of which each field is named becomes `section.*`."""
    whole = {path.partition(".")[0] for path, _ in of}
    whole -= {path.partition(".")[0] for path, row in of if row[1] != SEE_BELOW and row[0] not in fields}
    names = (field if (top := field.strip("`").partition("."))[0] not in whole else f"`{top[0]}.*`" for field in fields)
    return list(dict.fromkeys(names))


def tables_of(fields: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """Yield a table for each section."""
    for section, rows in groupby(fields, key=lambda field: field[0]):
        yield f"### {section}\n\n" + table(["field", "default", "meaning"], [list(row) for _, row in rows])


def default_of(info: Any) -> str:
    from proxima.config.scalars import in_one_line, to_json

    if info.slot and info.slot.default and info.default in (None, dataclasses.MISSING):
        return f"`{info.slot.default}`"
    if info.default is dataclasses.MISSING:
        return "required"
    if info.section is not None and info.default is not None:
        return SEE_BELOW
    return f"`{in_one_line(to_json(info.default))}`"


def fields_in_words(fields: dict[str, Any], common: Collection[tuple[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Return the fields of a kind with their defaults: its own, each with its meaning, and those in `common`."""
    own, others = list[str](), dict[str, str]()
    for name, fact in fields.items():
        if (name, fact["help"]) in common:
            others[name] = value_of(fact)
        else:
            own.append(f"`{name}` {value_of(fact)}" + (f": {fact['help']}" if fact["help"] else ""))
    return own, others


def value_of(fact: dict[str, Any]) -> str:
    """Return the default of a field."""
    from proxima.config.scalars import in_one_line

    if "required" in fact:
        return "required"
    return f"`{in_one_line(fact['default'])}`"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines)


def escaped(cell: str) -> str:
    """Return the text of a cell with bars escaped, and `<` outside `code`, where Markdown would read it as HTML."""
    parts = cell.replace("|", "\\|").split("`")
    return "`".join(
        part if i % 2 else part.replace("<", "&lt;").replace("&lt;br>", "<br>") for i, part in enumerate(parts)
    )


def with_metrics(page: str) -> str:
    """Return the text of a page with its table of metrics made anew."""
    from proxima.view.microscope.trend import VITAL, metric_groups

    elsewhere = {VITAL, *(group for groups in METRICS.values() for group in groups)}
    groups = METRICS[page] or [group for group in metric_groups() if group not in elsewhere]
    rows = [
        [f"`{names.replace(', ', '`, `')}`", meaning]
        for group in groups
        for names, meaning in metric_groups()[group].items()
    ]
    text = (REFERENCE.parent / page).read_text(encoding="utf-8")
    made = f"{MADE}\n{table(['metric', 'meaning'], rows)}\n"
    return re.sub(rf"{MADE}\n(\|.*\n)+", lambda _: made, text)


def with_ideal_ranges(text: str) -> str:
    """Return the text of docs/mismatch.md with its table of ranges made anew."""
    from proxima.core.correction.health import BOUNDED, RANGES

    rows = []
    for each in RANGES:
        words = each.words()
        healthy = words["healthy"] + (" (ours)" if each.ours else "")
        names = f"`{'`, `'.join(each.names)}`"
        rows.append([names, healthy, words["watch"], words["broken"], each.text, each.page, each.typical])
    for name, (side, wording) in BOUNDED.items():
        sign = "≤" if side == "upper" else "≥"
        rows.append([f"`{name}`", f"{sign} `correction.{side}`", "else", "–", wording, "", ""])
    head = ["metric", "healthy", "watch", "broken", "the pull request's text", "its page", "typical"]
    made = f"{MADE_OF_RANGES}\n{table(head, rows)}\n"
    return re.sub(rf"{MADE_OF_RANGES}\n(\|.*\n)+", lambda _: made, text)


def with_columns(text: str) -> str:
    """Return the text of docs/run_folder.md with its table of the stored columns of tokens made anew."""
    from proxima.data.columns import TOKEN_COLUMNS
    from proxima.runtime.state.completion_columns import in_file

    rows = []
    for column in TOKEN_COLUMNS.values():
        if column.stored:
            kind = "int8 or int16" if column.dtype == "id" else column.dtype
            if column.unit:
                meaning = f"{column.unit}, {column.meaning}"
            else:
                meaning = column.meaning
            names = "`, `".join(in_file([column.name]))
            rows.append([f"`{names}`", f"{kind} [{column.axes.replace(' ', ', ')}]", column.by, meaning])
    made = f"{MADE_OF_COLUMNS}\n{table(['column', 'type', 'filled by', 'meaning'], rows)}\n"
    return re.sub(rf"{MADE_OF_COLUMNS}\n(\|.*\n)+", lambda _: made, text)


def pages() -> dict[Path, str]:
    """Return the text of every generated page, and of those with a generated table."""
    import method_pages

    from proxima.config.json_schema import schema_text

    tables = {REFERENCE.parent / page: with_metrics(page) for page in METRICS}
    mismatch = REFERENCE.parent / "mismatch.md"
    tables[mismatch] = with_ideal_ranges(tables[mismatch])
    folder = REFERENCE.parent / "run_folder.md"
    tables[folder] = with_columns(tables[folder])
    schema = {REPOSITORY / "recipes" / "schema.json": schema_text()}
    return {REFERENCE: reference(), **schema, **tables, **method_pages.pages()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args()
    if options.check:
        stale = [
            path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        for path in stale:
            print(f"error: {path.relative_to(REPOSITORY)} is out of date; run make docs", file=sys.stderr)
        return int(bool(stale))
    import first_screen
    import method_pages

    for path, text in (pages() | method_pages.figures()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(REPOSITORY))
    if (DEMO / "summary.json").is_file():
        from learning_curve import LearningCurve

        from proxima.view.chart import write_figure

        write_figure(LearningCurve.of(DEMO), CURVE)
        print(CURVE.relative_to(REPOSITORY))
    else:
        print(f"{CURVE.relative_to(REPOSITORY)} left as it is: no run in runs/quickstart; make demo makes one")
    first_screen.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
