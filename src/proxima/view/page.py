"""Renders an HTML page that needs no network: its style and its script are inline, and its content security policy
forbids any other script and any request."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from proxima.view.chart import palette_css
from proxima.view.formatting import count, visible

HERE = Path(__file__).parent


def render(name: str, *, styles: Sequence[str], **values: Any) -> str:
    """Render `NAME.html.j2` with `NAME.js`, if there is one, and style sheets of this folder; jinja escapes every value
    that is not `Markup`, and makes control characters in it visible."""
    file = HERE / f"{name}.js"
    script = file.read_text(encoding="utf-8") if file.is_file() else ""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()
    style = palette_css(":root") + "".join((HERE / sheet).read_text(encoding="utf-8") for sheet in styles)
    return (
        _environment()
        .get_template(f"{name}.html.j2")
        .render(script=Markup(script), script_digest=digest, style=Markup(style), **values)
    )


@cache
def _environment() -> jinja2.Environment:
    """The environment of all pages, which compiles a template once."""
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
