"""The commands that README, the docs, the examples and `--help` print, as a shell would read them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxima.cli.commands import COMMANDS, load_command
from proxima.cli.help_page import EPILOG, WITH_ACTIONS

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = "proxima|python|make|pip|git|cat|cd|source|export|tar"
STARTS = re.compile(rf"(?:\$ )?((?:[A-Z0-9_]+=\S+ )*(?:{PROGRAMS}) \S.*)")
INLINE = re.compile(r"`((?:proxima|python -m|python examples/|python scripts/|make) [^`]+)`")


@dataclass(frozen=True)
class Printed:
    """A command of a page: its line there, its text, whether it is a mention inside a sentence, and what it reads up to
    `END`."""

    page: str
    line: int
    text: str
    mention: bool = False
    body: str = ""

    @property
    def steps(self) -> list[list[str]]:
        """The words of each command between `&&`; comments are left out."""
        words, steps = shlex.split(self.text, comments=True), [[]]
        for word in words:
            if word == "&&":
                steps.append([])
            else:
                steps[-1].append(word)
        return steps


def of_markdown(page: str) -> Iterator[Printed]:
    """Those of indented and fenced blocks, and then those in backticks that are more than a name."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    fence, number, prose = None, 0, []
    while number < len(lines):
        line, at = lines[number], number + 1
        number += 1
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
        elif fence is not None or line.startswith("    "):
            if fence in (None, "", "bash", "console") and (match := STARTS.fullmatch(line.strip())):
                text = match[1]
                while text.endswith("\\"):
                    text = text[:-1] + lines[number].strip()
                    number += 1
                body = []
                while text.endswith("<<'END'") and lines[number] != "END":
                    body.append(lines[number] + "\n")
                    number += 1
                yield Printed(page, at, text, body="".join(body))
        else:
            prose.append((at, line))
    joined = "\n".join(text for _, text in prose)
    for match in INLINE.finditer(joined):
        text = " ".join(match[1].split())
        words = text.split()
        if len(words) == 3 and ((words[1] in ("eval", *WITH_ACTIONS) and not words[2].isupper()) or words[2][0] == "-"):
            continue  # the name of a subcommand or an option
        if "…" in words:
            continue  # a shape
        if len(words) > 2 or (text.startswith("proxima ") and words[1] not in COMMANDS):
            yield Printed(page, prose[joined[: match.start()].count("\n")][0], text, mention=True)


def section(page: str, heading: str) -> str:
    """The text below a heading of a page, up to the next heading of its level or above."""
    text = (ROOT / page).read_text(encoding="utf-8")
    level = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert level is not None, f"{page} has no section {heading!r}"
    rest = text[level.end() :]
    lines, fenced = [], False
    for line in rest.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if not fenced and re.match(rf"#{{1,{len(level[1])}}} ", line):
            break
        lines.append(line)
    return "".join(lines)


def fence(page: str, start: str) -> str:
    """The first fenced block of a page that has these words."""
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if start in block)


def of_comments(page: str) -> Iterator[Printed]:
    """Those of the comments at the top of a recipe, and of the docstring of an example."""
    text = re.sub(r" \\\n# +", " ", (ROOT / page).read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.fullmatch(r"#? {0,4}((?:proxima|python) \S.*)", line):
            yield Printed(page, number, match[1])


def of_help() -> Iterator[Printed]:
    """Those of `proxima --help` and of the help of each command."""
    texts = {"proxima --help": EPILOG}
    texts |= {f"proxima {name} --help": load_command(name, place)[1] for name, (place, _) in COMMANDS.items()}
    for page, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("proxima "):
                yield Printed(page, number, line)


def pages() -> dict[str, list[Printed]]:
    """Page → its commands in printed order."""
    names = ["README.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md"]
    names += sorted(
        str(file.relative_to(ROOT))
        for folder in ("docs", *ROOT.glob("packages/*/docs"), "benchmarks/results")
        for file in (ROOT / folder).rglob("*.md")
    )
    values = {name: list(of_markdown(name)) for name in names}
    for folder, pattern in (
        ("recipes", "*.yaml"),
        ("examples", "*.yaml"),
        ("examples", "*.py"),
        ("src/proxima/cli/starter", "*"),
    ):
        for file in sorted((ROOT / folder).rglob(pattern)):
            name = str(file.relative_to(ROOT))
            values[name] = list(of_comments(name)) if file.is_file() and file.suffix != ".pyc" else []
    values["proxima --help"] = list(of_help())
    return {name: commands for name, commands in values.items() if commands}
