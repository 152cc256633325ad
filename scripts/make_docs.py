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
from collections.abc import Collection, Iterator
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

HEAD = """\
# Reference

Every field of a recipe and every kind in every slot. Generated from the code by `make docs`; do not edit it here.
`proxima list SLOT` prints the same in a terminal, `proxima explain RECIPE` shows the values of a recipe and where each
came from, and `recipes/schema.json` completes them in an editor.

A slot takes `{kind: NAME, field: value}` or, with the defaults, `NAME`; `package.module:Class` names a class of yours.
"""


def reference() -> str:
    """Return the text of docs/reference.md."""
    from proxima.config.families import OFFLINE
    from proxima.config.json_schema import catalogue
    from proxima.config.schema import RunConfig

    parts = [HEAD, "## Fields\n"]
    parts += [f"{section}\n" for section in sections(RunConfig, "")]
    for family in OFFLINE:
        parts.append(f"## Fields of {family.name} recipes\n")
        same = shared(family.root)
        parts.append("What is not listed is as above: " + ", ".join(f"`{name}`" for name in same) + ".\n")
        parts += [f"{section}\n" for section in sections(family.root, "", skip=same)]
    parts.append("## Kinds\n")
    for name, slot in sorted(catalogue().items()):
        parts.append(f"### {name}\n\n`{'`, `'.join(slot['paths'])}`: {slot['meaning']}\n")
        rows = [
            [f"`{kind}`", facts["summary"], fields_in_words(facts["fields"])] for kind, facts in slot["kinds"].items()
        ]
        parts.append(table(["kind", "what it is", "fields"], rows) + "\n")
    return "\n".join(parts)


def shared(family: type) -> list[str]:
    """Return the fields of a family's recipe that are the same as for `proxima train`."""
    from proxima.config.describe import fields_of
    from proxima.config.schema import RunConfig

    hints = {info.name: info.hint for info in fields_of(RunConfig) if not info.slot}
    return [info.name for info in fields_of(family) if info.section and hints.get(info.name) is info.hint]


def sections(cls: type, path: str, skip: Collection[str] = ()) -> Iterator[str]:
    """Yield a table of the fields of a config class, then those of the classes below it; `skip` excludes some."""
    from proxima.config.describe import fields_of

    rows, below = [], []
    for info in fields_of(cls):
        if info.name in skip:
            continue
        if info.section is not None:
            below.append((info.section, f"{path}{info.name}."))
        rows.append([f"`{path}{info.name}`", default_of(info), info.help])
    yield f"### {path.removesuffix('.') or 'a recipe'}\n\n" + table(["field", "default", "meaning"], rows)
    for inner, name in below:
        yield from sections(inner, name)


def default_of(info: Any) -> str:
    from proxima.config.scalars import in_one_line, to_json

    if info.slot and info.slot.default and info.default in (None, dataclasses.MISSING):
        return f"`{info.slot.default}`"
    if info.default is dataclasses.MISSING:
        return "required"
    if info.section is not None and info.default is not None:
        return "see below"
    return f"`{in_one_line(to_json(info.default))}`"


def fields_in_words(fields: dict[str, Any]) -> str:
    from proxima.config.scalars import in_one_line

    shown = []
    for name, fact in fields.items():
        value = "required" if "required" in fact else f"`{in_one_line(fact['default'])}`"
        shown.append(f"`{name}` {value}" + (f": {fact['help']}" if fact["help"] else ""))
    return "<br>".join(shown)


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
    """Return the text of docs/mismatch.md with its table of ideal ranges made anew."""
    from proxima.core.correction.health import IDEAL_RANGES

    rows = []
    for ideal in IDEAL_RANGES:
        words = ideal.words()
        healthy = words["healthy"] + (" (ours)" if ideal.ours else "")
        rows.append([f"`{'`, `'.join(ideal.names)}`", healthy, words["watch"], words["broken"], ideal.peer])
    made = f"{MADE_OF_RANGES}\n{table(['metric', 'healthy', 'watch', 'broken', 'the pull request'], rows)}\n"
    return re.sub(rf"{MADE_OF_RANGES}\n(\|.*\n)+", lambda _: made, text)


def with_columns(text: str) -> str:
    """Return the text of docs/run_folder.md with its table of the stored columns of tokens made anew."""
    from proxima.data.columns import TOKEN_COLUMNS
    from proxima.runtime.state.completion_columns import in_file

    rows = []
    for column in TOKEN_COLUMNS.values():
        if column.stored:
            kind = "int8 or int16" if column.dtype == "id" else column.dtype
            meaning = f"{column.unit}, {column.meaning}" if column.unit else column.meaning
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
