"""The site of the pages, by Sphinx: `make site` builds the folder `site/`.

Sphinx, because
    - MyST reads Markdown as the repository's hosting does. Python-Markdown, which MkDocs and Zensical use, joins a list
      to the paragraph before it, flattens lists indented by two spaces and prints the backslash of `\\|` in tables.
    - its folder of sources is the repository: pages outside docs/ are pages, linked files are copied, and no link is
      rewritten. With `--fail-on-warning` a page, anchor, file or picture that is missing ends the build.
    - fonts and scripts come with the site: it needs neither a server nor a network. Its own search shows pages alone
      where a script may not read the other files of a folder, so `search.js` finds sections in one file of them all.
    - MkDocs with Material ends in May 2027; Zensical, its successor, is an alpha, and its pages load fonts and a script
      from other addresses.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any
from urllib.parse import quote

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src")]

from docstrings import as_rst  # noqa: E402

project = "proxima"
html_title = "proxima"
language = "en"
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/**",
    "recipes/**",
    "benchmarks/**",
    "evidence/**",
    "tests/README.md",
    "packages/*/docs/**",
]
exclude_patterns = [".*", "runs", "models", "data", "build", "src", "site", "**/__pycache__"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]
highlight_language = "none"  # of an indented block: a formula, a command or what it prints

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_display_short_literal_types = True
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "logo": {"text": "proxima"},
    "navbar_center": ["door_links.html"],
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
}
SIDEBARS = ("[A-Z]*", "docs/**", "recipes/**", "benchmarks/**", "evidence/**", "packages/**", "tests/**", "search")
html_sidebars = {page: ["doors.html"] for page in SIDEBARS}  # pages of code have none
html_static_path = ["site.css", "search.js"]
html_css_files = ["site.css"]
templates_path = ["."]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_use_index = False

DOORS = re.split(r"^## ", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
html_context = {"default_mode": "auto", "doors": [door.partition("\n")[0] for door in DOORS]}

#: A page, and the pages below it in the navigation. Those below the first one are the links in the tables of the index.
BELOW = {
    "docs/algorithms/README": "docs/algorithms/*",
    "benchmarks/README": "benchmarks/**",
    "docs/evidence": "evidence/**",
    "CONTRIBUTING": "tests/README",
    "docs/site/api": "docs/site/api/*",
}


CODE = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".txt": "text"}  # suffix: its lexer


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Adds hidden tables of contents: to the first page the doors of the index, to others the pages below them."""
    if name == root_doc:
        source[0] += contents(["/docs/index"], ":titlesonly:")
        for door in DOORS:
            rows = re.findall(r"^\| \[([^]]+)\]\(([^)#]+)\)", door, flags=re.MULTILINE)
            pages = [(title, normpath(join("docs", page)).rpartition(".")) for title, page in rows]
            entries = [
                f"{title[0].upper()}{title[1:]} </{page}>".replace("`", "")
                for title, (page, _, suffix) in pages
                if suffix in ("md", "rst")
            ]
            source[0] += contents(entries, ":caption: " + door.partition("\n")[0])
    elif name in BELOW and not name.startswith("docs/site/"):
        source[0] += contents([f"/{BELOW[name]}"], ":glob:")


def contents(entries: list[str], option: str) -> str:
    return "\n".join(["\n\n```{toctree}", ":hidden:", option, "", *entries, "```\n"])


def write_redirects(app: Any, failure: Exception | None) -> None:
    """Writes a page at the place of every page that is gone, and the first page of the folder."""
    if failure:
        return
    moved = (ROOT / "docs/site/moved.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)\.md` \| \[.*\]\((.+)\.md(#.*)?\) \|$", moved, flags=re.MULTILINE)
    places = {old: normpath(join("docs/site", new)) + f".html{anchor}" for old, new, anchor in rows}
    for old, new in {**places, "index": f"{root_doc}.html"}.items():
        page = Path(app.outdir, f"{old}.html")
        to = relpath(new, Path(old).parent.as_posix())
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">This page has moved.</a></html>\n',
            encoding="utf-8",
        )


LATER = ("CHANGELOG", "benchmarks/", "evidence/", "tests/")  # pages that the search lists after the guides


def write_search_sections(app: Any, failure: Exception | None) -> None:
    """Writes what `search.js` finds: sections, rows of tables and names, with address, page, anchor, title and text."""
    if failure or app.builder.format != "html":
        return
    found: list[list[Any]] = []
    for name in sorted(app.env.found_docs - {"docs/site/moved"}):
        weight = 0.4 if name.startswith(LATER) else 1
        page = app.env.titles[name].astext()
        for anchor, title, text in sections(app.env.get_doctree(name), "", page):
            address = app.builder.get_relative_uri("search", name) + (f"#{anchor}" if anchor else "")
            found.append([address, page, anchor, title, " ".join(text.replace("<br>", " ").split()), weight])
    script = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    Path(app.outdir, "_static/search_sections.js").write_text(f"const SECTIONS = {script};\n", encoding="utf-8")


def sections(node: Any, anchor: str, title: str) -> Iterator[tuple[str, str, str]]:
    """Yields anchor, title and text of this section and of those in it; a row of a table that begins with code, as a
    field does, and a documented name are sections too."""
    texts: list[str] = []
    for child in node.children:
        if isinstance(child, nodes.section):
            yield from sections(child, child["ids"][0], child[0].astext())
        elif isinstance(child, addnodes.desc):
            ids = child[0].get("ids")
            yield from sections(child[-1], *((ids[0], child[0]["fullname"]) if ids else (anchor, title)))
        elif isinstance(child, nodes.table):
            for row in child.findall(nodes.row):
                first, *cells = (cell.astext() for cell in row)
                if any(isinstance(part, nodes.literal) for part in row[0].findall()):
                    yield f"{anchor}:~:text={quote(first, safe='')}", first, "; ".join(cells)
                else:
                    texts.append("; ".join([first, *cells]))
        elif not isinstance(child, nodes.title | nodes.comment | nodes.raw | addnodes.toctree | addnodes.index):
            texts.append(child.astext())
    if texts or isinstance(node, nodes.section):
        yield anchor, title, "\n".join(texts)


def mark_commands(app: Any, doctree: nodes.document, name: str) -> None:
    """Gives blocks of commands the class by which their lines wrap, so that a comment behind a command is in sight."""
    for block in doctree.findall(nodes.literal_block):
        if re.search(r"\S {2,}# ", block.astext()):
            block["classes"].append("commands")


def code_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each linked file of code, which a browser would otherwise save."""
    for path in app.env.dlfiles:
        if Path(path).suffix in CODE:
            text = Path(app.srcdir, path).read_text(encoding="utf-8")
            body = app.builder.highlighter.highlight_block(text, CODE[Path(path).suffix], linenos=False)
            body = f'<div class="code-page"><h1><code>{path}</code></h1>\n{body}</div>'
            yield f"code/{path}", {"title": path, "body": body}, "page.html"


def link_code_pages(app: Any, doctree: nodes.document, name: str) -> None:
    for node in list(doctree.findall(addnodes.download_reference)):
        path = app.env.relfn2path(node["reftarget"], name)[0]
        if Path(path).suffix in CODE:
            address = app.builder.get_relative_uri(name, f"code/{path}")
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=address))


def write_formula(translator: Any, node: Any) -> None:
    """Writes TeX as MathML, which browsers render without a script or fonts."""
    block = node.tagname == "math_block"
    formula = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", lambda app, what, name, obj, options, lines: as_rst(lines))
    app.connect("html-collect-pages", code_pages)
    app.connect("doctree-resolved", link_code_pages)
    app.connect("doctree-resolved", mark_commands)
    app.connect("build-finished", write_redirects)
    app.connect("build-finished", write_search_sections)
