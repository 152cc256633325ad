"""The resolved config as YAML: complete, each value with its provenance behind it, and loading back to the equal
config."""

from typing import Any

from proxima.config.builder import ResolvedValue
from proxima.config.resolve import Resolved
from proxima.config.scalars import for_any_reader

Branch = dict[str, Any]  # nested by the parts of the path; a leaf is an `ResolvedValue`


def dump(resolved: Resolved[Any]) -> str:
    """YAML text. `resolve` of it gives a config equal to `resolved.config`; where a value came from stands in a comment
    behind it."""
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
    origin = (
        f"# Resolved from {resolved.recipe}; each value stands with where it came from.\n" if resolved.recipe else ""
    )
    return f"{origin}{body}\n"


def _branch(branch: Branch, depth: int) -> list[tuple[str, str | None]]:
    margin = "  " * depth
    lines: list[tuple[str, str | None]] = []
    for key, child in branch.items():
        if isinstance(child, ResolvedValue):
            lines.append((f"{margin}{key}: {for_any_reader(child.value)}", child.source))
        elif all(part.isdigit() for part in child):
            lines.append((f"{margin}{key}:", None))
            for item in child.values():
                lines.extend(_item(item, depth + 1))
        else:
            lines.append((f"{margin}{key}:", None))
            lines.extend(_branch(child, depth + 1))
    return lines


def _item(item: Branch, depth: int) -> list[tuple[str, str | None]]:
    """A list entry: the dash stands before its first field."""
    inner = _branch(item, depth + 1)
    margin = "  " * depth
    (first, comment), *rest = inner
    return [(f"{margin}- {first.lstrip()}", comment), *rest]
