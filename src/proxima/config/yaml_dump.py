"""The resolved config as YAML: complete, each value followed by its provenance; it loads back to the same config."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from proxima.config.resolved import Resolved, ResolvedValue
from proxima.config.scalars import for_any_reader
from proxima.config.tree import is_index
from proxima.system.user_files import shown_path

Lines = list[tuple[str, str | None]]  # each with the comment that follows it


def dump(resolved: Resolved[Any], earlier: Path | None = None) -> str:
    """YAML text that `resolve` turns into a config equal to `resolved.config`; comments say where values came from.

    Args:
        earlier: a file that this wrote before, if there is one: a value that was read from it keeps its comment there.
    """
    said = [] if earlier is None or not earlier.is_file() else earlier.read_text(encoding="utf-8").splitlines()
    comments = ((number, line.rpartition("  # ")[2]) for number, line in enumerate(said, 1) if "  # " in line)
    kept = {f"{shown_path(earlier or Path())}:{number}": comment for number, comment in comments}

    def leaf(key: str, value: ResolvedValue, margin: str) -> Lines:
        return [(f"{margin}{key}: {for_any_reader(value.value)}", kept.get(value.where, value.source))]

    lines = yaml_lines(nested((entry.path, entry) for entry in resolved.entries), leaf)
    width = min(60, max((len(text) for text, _ in lines), default=0))
    body = "\n".join(f"{text:<{width}}  # {comment}" if comment else text for text, comment in lines)
    header = f"# Resolved from {resolved.recipe}; each value with its origin.\n" if resolved.recipe else ""
    if any(entry.where in kept for entry in resolved.entries):
        header = f"{said[0]}\n" if said[0].startswith("# ") else ""  # a recipe that came from Python has none
    return f"{header}{body}\n"


def nested(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nest leaves with dotted paths in a tree, one level per part of a path; a list has the keys 0, 1, …"""
    root: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, last = path.split(".")
        branch = root
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[last] = leaf
    return root


def yaml_lines(tree: dict[str, Any], leaf: Callable[[str, Any, str], Lines], margin: str = "") -> Lines:
    """A tree of `nested` as YAML; `leaf(key, value, margin)` returns a leaf's lines, the last of which is no
    comment."""
    lines: Lines = []
    for key, child in tree.items():
        if not isinstance(child, dict):
            lines += leaf(key, child, margin)
            continue
        lines.append((f"{margin}{key}:", None))
        if not all(map(is_index, child)):
            lines += yaml_lines(child, leaf, f"{margin}  ")
            continue
        for index in sorted(child, key=int):  # an item of a list: the dash precedes its first field
            inner = yaml_lines(child[index], leaf, f"{margin}    ")
            first = next(i for i, (text, _) in enumerate(inner) if not text.lstrip().startswith("#"))
            for at, (text, comment) in enumerate(inner[: first + 1]):
                lines.append((f"{margin}  {'- ' if at == first else ''}{text.lstrip()}", comment))
            lines += inner[first + 1 :]
    return lines
