"""The resolved config as YAML: complete, each value with its provenance behind it; it loads back to the same config."""

from typing import Any

from proxima.config.builder import ResolvedValue
from proxima.config.resolve import Resolved
from proxima.config.scalars import for_any_reader

Branch = dict[str, Any]  # nested by the parts of the path; a leaf is a `ResolvedValue`


def dump(resolved: Resolved[Any]) -> str:
    """YAML text, of which `resolve` gives a config equal to `resolved.config`; comments say where values came from."""
    root: Branch = {}
    for entry in resolved.entries:
        *parents, leaf = entry.path.split(".")
        branch = root
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[leaf] = entry
    lines = _branch(root, 0)
    width = min(60, max((len(text) for text, _ in lines), default=0))
    body = "\n".join(f"{text:<{width}}  # {comment}" if comment else text for text, comment in lines)
    header = f"# Resolved from {resolved.recipe}; each value with its origin.\n" if resolved.recipe else ""
    return f"{header}{body}\n"


def _branch(branch: Branch, depth: int) -> list[tuple[str, str | None]]:
    margin = "  " * depth
    lines: list[tuple[str, str | None]] = []
    for key, child in branch.items():
        if isinstance(child, ResolvedValue):
            lines.append((f"{margin}{key}: {for_any_reader(child.value)}", child.source))
            continue
        lines.append((f"{margin}{key}:", None))
        if not all(part.isdigit() for part in child):
            lines += _branch(child, depth + 1)
            continue
        for item in child.values():  # of a list: the dash stands before its first field
            (first, comment), *rest = _branch(item, depth + 2)
            lines += [(f"{margin}  - {first.lstrip()}", comment), *rest]
    return lines
