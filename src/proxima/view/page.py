"""Renders a page of runs in one file that needs no network: an export of the viewer, with its style sheet, its modules
and its answers inline; the result itself is HTML and needs no script. Its policy forbids everything else."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from proxima.system.jsonl import dumps
from proxima.view.formatting import count, visible
from proxima.view.microscope.single_file import PAGE, bundle, inert_json, policy_of

HERE = Path(__file__).parent
DIGITS = 6


def render(name: str, *, answers: Mapping[str, Any], style: str = "", **values: Any) -> str:
    """Render `NAME.html.j2` with `NAME.js`, if there is one, which draws `answers`, those of the viewer's server by
    path. `style` precedes the style sheets of all pages. Jinja escapes every value that is not `Markup`, and makes
    control characters in it visible."""
    if (HERE / f"{name}.js").is_file():
        script = bundle(f"{name}.js", (HERE, PAGE))
    else:
        script = ""
    sheets = (PAGE / "microscope.css", HERE / "report.css")
    page: str = (
        _environment()
        .get_template(f"{name}.html.j2")
        .render(
            policy=policy_of(script),
            style=Markup(style + "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)),
            script=Markup(script),
            exported=Markup(inert_json({"start": "", "data": _shortened(answers)})),
            **values,
        )
    )
    return page


def _shortened(answers: Mapping[str, Any]) -> Any:
    """Return the same with fewer digits, so that long runs are small pages."""
    return json.loads(dumps(answers), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))


@cache
def _environment() -> Any:
    """The environment of all pages, of jinja2, which compiles a template once."""
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    jinja.filters["count"] = count
    return jinja
