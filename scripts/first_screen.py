"""Draw docs/first_screen.svg, the picture at the top of README: the demo in a terminal next to its learning curve.

Both show one run: the terminal's figures are those in the title of docs/learning_curve.svg, which the run has drawn.
"""

import re
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH, HEIGHT, LEFT = 1180, 346, 396
STYLE = """\
.panel { fill: #10151c; } .bar { fill: #2c323a; } .shell { font: 13px ui-monospace, Menlo, Consolas, monospace; }
.shell text { fill: #9198a1; } .shell .typed { fill: #e6edf3; } .shell .result { fill: #f2a164; font-weight: 600; }
"""


def picture(curve: str) -> str:
    """Return the picture, from the text of the learning curve."""
    title = re.search(r"<title>(.*?)</title>", curve)
    figures = title and re.fullmatch(
        r"held-out accuracy (\S+) → (\S+) of (\d+) questions in (\d+) steps, (.+)", title[1]
    )
    if not figures:
        raise ValueError("docs/learning_curve.svg has no title with its figures; run make demo, then make docs")
    before, after, questions, steps, took = figures.groups()
    lines = [
        ("typed", "$ make demo"),
        ("", "SmolLM2-135M-Instruct learns to add"),
        ("", f"{steps} steps in {took} on two CPU cores"),
        ("result", f"held-out accuracy {before} → {after}"),
        ("", f"{questions} questions, none trained on"),
        ("", ""),
        ("typed", "$ proxima train runs/quickstart --resume"),
        ("", "after a kill: the same bits"),
        ("", ""),
        ("typed", "w = π_proximal / μ,  r = π / π_proximal"),
        ("", "an algorithm is what bounds r"),
    ]
    rows = [
        f'<text class="{kind}" x="34" y="{74 + 23 * i}">{escape(text)}</text>' for i, (kind, text) in enumerate(lines)
    ]
    inner = curve.strip().replace("<svg ", f'<svg x="{LEFT + 14}" y="8" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}">{title[0]}<style>{STYLE}</style><rect class="panel" x="14" y="14" width="{LEFT - 14}" '
        f'height="{HEIGHT - 28}" rx="10"/>'
        + "".join(f'<circle class="bar" cx="{36 + 18 * i}" cy="36" r="5.5"/>' for i in range(3))
        + f'<g class="shell">{"".join(rows)}</g>{inner}</svg>\n'
    )


def main() -> None:
    text = picture((DOCS / "learning_curve.svg").read_text(encoding="utf-8"))
    (DOCS / "first_screen.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
