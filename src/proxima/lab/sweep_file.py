"""A sweep from its file: which cells there are, and how they differ from the recipe.

    recipe ← `set` (every cell) ← one value of each axis of `grid` ← one of `cells`
Layers merge as those of a recipe do (`config.tree`).
"""

import fnmatch
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from proxima.config.describe import layout_of
from proxima.config.errors import ConfigError, Problem, one_problem, suggestion
from proxima.config.read import read_yaml, shown_path
from proxima.config.schema import RunConfig
from proxima.config.tree import Layout, Node, Source, merge
from proxima.lab.sweep_plan import Sweep, SweepCell

FIELDS = ("recipe", "folder", "seeds", "jobs", "set", "grid", "cells")
TAKEN = {"seed": "seeds: [1, 2, 3] gives the seeds", "folder": "each run gets one below the sweep's own"}
UNSAFE = re.compile(r"[^A-Za-z0-9._=+,-]+")
LONGEST_NAME = 120  # characters of a cell's name; file systems take 255 bytes


def read_sweep(
    file: str | Path, *, folder: str | Path | None = None, jobs: int | None = None, only: Sequence[str] = ()
) -> Sweep:
    """Read a sweep file.

    Args:
        file: YAML; its fields are `recipe`, `folder`, `seeds`, `jobs`, `set`, `grid`, `cells`.
        folder, jobs: over those of the file.
        only: names of cells, or patterns like `*lr=1e-5`; the others are left out.

    Raises:
        ConfigError: one line for each thing that is wrong with the file itself; the cells' configs are looked at by
            `plan_runs`.
    """
    file = Path(file)
    if not file.is_file():
        raise one_problem(shown_path(file), "no such sweep; give the path of a YAML file, see docs/laboratory.md")
    root = read_yaml(file)
    reader = _SweepFileReader(file, root.mapping or {})
    recipe, seeds = reader.recipe(), reader.seeds()
    wanted_jobs, cells = reader.jobs(jobs), reader.cells(recipe)
    if reader.problems:
        raise ConfigError(reader.problems)
    assert recipe is not None
    place = Path(folder) if folder else reader.folder()
    asked = {**root.to_python(), "recipe": shown_path(recipe)}
    return Sweep(
        file=file,
        recipe=recipe,
        folder=place,
        seeds=seeds,
        jobs=wanted_jobs,
        cells=_chosen(cells, only),
        every=cells,
        asked=asked,
    )


def _chosen(cells: tuple[SweepCell, ...], only: Sequence[str]) -> tuple[SweepCell, ...]:
    names = [cell.name for cell in cells]
    for wanted in only:
        if not fnmatch.filter(names, wanted) and wanted not in names:
            raise one_problem("--only", f"no cell {wanted!r}; {suggestion(wanted, names)}")
    return tuple(
        cell for cell in cells if not only or any(cell.name == w or fnmatch.fnmatchcase(cell.name, w) for w in only)
    )


class _SweepFileReader:
    """The fields of a sweep file; collects what is wrong with them."""

    def __init__(self, file: Path, fields: Mapping[str, Node]) -> None:
        self.file, self.fields = file, fields
        self.problems: list[Problem] = []
        for key, node in fields.items():
            if key not in FIELDS:
                self.fail(key, f"a sweep has no such field; {suggestion(key, FIELDS)}", node)

    def fail(self, path: str, message: str, node: Node | None = None) -> None:
        shown = (None, None) if node is None else (node.shown(), node.source.text)
        self.problems.append(Problem(path, message, *shown))

    def recipe(self) -> Path | None:
        node = self.fields.get("recipe")
        if node is None or not isinstance(node.value, str):
            self.fail("recipe", "must be the path of a recipe: recipe: recipes/quickstart.yaml", node)
            return None
        for place in (self.file.parent / node.value, Path(node.value)):
            if place.exists():
                return _plain(place)
        self.fail("recipe", f"no such file beside {shown_path(self.file)}, nor in the current folder", node)
        return None

    def folder(self) -> Path:
        node = self.fields.get("folder")
        if node is None or node.value is None:
            return Path("runs") / self.file.stem
        return Path(str(node.value)).expanduser()

    def seeds(self) -> tuple[int, ...]:
        node = self.fields.get("seeds")
        if node is None:
            return (1,)
        values = [child.value for child in node.items or ()]
        if not values or not all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
        ):
            self.fail("seeds", "must be a list of whole numbers: seeds: [1, 2, 3]", node)
            return ()
        if len(set(values)) != len(values):
            self.fail("seeds", "names a seed twice, which would be the same run; keep one", node)
        return tuple(int(str(value)) for value in values)

    def jobs(self, wanted: int | None) -> int:
        node = self.fields.get("jobs")
        value = wanted if wanted is not None else 1 if node is None else node.value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(
                "jobs",
                f"is {value!r}; must be a whole number >= 1: how many runs go side by side",
                None if wanted is not None else node,
            )
            return 1
        return value

    def cells(self, recipe: Path | None) -> tuple[SweepCell, ...]:
        layout = layout_of(RunConfig)
        common, axes, named = self.layer("set", self.fields.get("set")), self.axes(), self.named()
        if self.problems:
            return ()
        short = _short([key for key, _ in axes])
        made: dict[str, SweepCell] = {}
        for name, own in named or [("", Node({}, _source(self.file)))]:
            for chosen in itertools.product(*(values for _, values in axes)):
                cell = _made(
                    name,
                    own,
                    common,
                    [(key, short[key], value) for (key, _), value in zip(axes, chosen, strict=True)],
                    layout,
                )
                cell = cell if cell.name else replace(cell, name=_safe(recipe.stem if recipe else "recipe"))
                if cell.name in made:
                    self.fail("cells", f"two cells have the name {cell.name!r}; name them under `cells`")
                made[cell.name] = cell
        return tuple(made.values())

    def layer(self, path: str, node: Node | None) -> Node:
        """`{train.steps: 4, engine: {dtype: …}}` as a tree."""
        tree = Node({}, _source(self.file) if node is None else node.source)
        if node is None or node.value is None:
            return tree
        if node.mapping is None:
            self.fail(path, "must be a mapping of dotted keys: {train.steps: 20}", node)
            return tree
        for key, child in sorted(node.mapping.items(), key=lambda pair: pair[0].count(".")):
            if self.good_key(f"{path}.{key}", key, child):
                tree = merge(tree, _nested(key, child), layout_of(RunConfig))
        return tree

    def good_key(self, path: str, key: str, node: Node) -> bool:
        if key in TAKEN:
            self.fail(path, f"is the sweep's to set: {TAKEN[key]}", node)
        elif not all(key.split(".")):
            self.fail(path, "has an empty part; write a dotted key like train.steps", node)
        elif key.partition(".")[0] not in RunConfig.__dataclass_fields__:
            self.fail(
                path,
                f"a recipe has no field {key.partition('.')[0]!r}; "
                f"{suggestion(key.partition('.')[0], RunConfig.__dataclass_fields__)}",
                node,
            )
        else:
            return True
        return False

    def axes(self) -> list[tuple[str, list[Node]]]:
        node = self.fields.get("grid")
        if node is None or node.value is None:
            return []
        if node.mapping is None:
            self.fail("grid", "must be a mapping of keys to lists: {algorithm: [grpo, cppo]}", node)
            return []
        axes = []
        for key, values in node.mapping.items():
            if not self.good_key(f"grid.{key}", key, values):
                continue
            if not values.items:
                self.fail(f"grid.{key}", "must be a list of values with at least one: [1e-5, 3e-5]", values)
            axes.append((key, values.items or []))
        return axes

    def named(self) -> list[tuple[str, Node]]:
        node = self.fields.get("cells")
        if node is None or node.value is None:
            return []
        if not node.mapping:
            self.fail("cells", "must be a mapping of names to values: {grpo_16: {algorithm: grpo}}", node)
            return []
        for name, child in node.mapping.items():
            if UNSAFE.search(name) or name.startswith((".", "-")) or len(name) > LONGEST_NAME:
                self.fail(
                    f"cells.{name}",
                    "is no name for a folder; use letters, digits and . _ - = + , and begin with none of . -",
                    child,
                )
        return [(name, self.layer(f"cells.{name}", child)) for name, child in node.mapping.items()]


def _plain(place: Path) -> Path:
    """`recipes/a.yaml` for `mine/../recipes/a.yaml`, unless a link makes them two files."""
    plain = Path(os.path.normpath(place))
    return plain if plain.exists() and plain.samefile(place) else place


def _source(file: Path) -> Source:
    return Source(shown_path(file))


def _nested(key: str, node: Node) -> Node:
    for part in reversed(key.split(".")):
        node = Node({part: node}, node.source)
    return node


def _made(name: str, own: Node, common: Node, chosen: Sequence[tuple[str, str, Node]], layout: Layout) -> SweepCell:
    """`set`, then the value of each axis (its key, its short key, the value), then what is written under the cell's
    name."""
    parts, tree = [name] if name else [], merge(Node({}, own.source), common, layout)
    for key, short, value in chosen:
        parts.append(f"{short}={_shown(value)}")
        tree = merge(tree, _nested(key, value), layout)
    tree = merge(tree, own, layout)
    leaves = list(_leaves("", tree, layout))
    overrides = tuple(
        f"{path}={json.dumps(node.to_python(), ensure_ascii=False, allow_nan=True)}" for path, node in leaves
    )
    overrides = tuple(re.sub(r"\bInfinity\b", ".inf", text) for text in overrides)
    return SweepCell(
        name=_safe(",".join(parts)), overrides=overrides, written={path: node.source.text for path, node in leaves}
    )


def _leaves(path: str, node: Node, layout: Layout) -> Iterable[tuple[str, Node]]:
    """Lists and scalars with their dotted paths. A slot's kind comes before its fields: laid over later it would drop
    them."""
    if not node.mapping:
        if path:
            yield path, node
        return
    for key in sorted(node.mapping, key=lambda key: key != layout.head):
        yield from _leaves(f"{path}.{key}" if path else key, node.mapping[key], layout.child(key))


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key's shortest end that no other key ends in: `train.optimizer.lr` as `lr`."""
    out = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        others = [other for other in keys if other != key]
        out[key] = next((end for end in ends if not any(o == end or o.endswith("." + end) for o in others)), key)
    return out


def _shown(node: Node) -> str:
    """A value in a cell's name: a scalar as it was written, a spec by its kind and what is set beside it."""
    if node.mapping is not None:
        head = node.mapping.get("preset") or node.mapping.get("kind")
        rest = [f"{key}={_shown(child)}" for key, child in node.mapping.items() if child is not head]
        return "-".join(([_shown(head)] if head else []) + rest) or "empty"
    if node.items is not None:
        return "+".join(_shown(child) for child in node.items) or "none"
    return str(node.text if node.text is not None else node.value) or "empty"


def _safe(name: str) -> str:
    name = UNSAFE.sub("_", name)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
