"""Reads a sweep file: its cells, and how they differ from the recipe.

    recipe ← `set` (every cell) ← one value of each axis of `grid` ← one of `cells`
Layers are merged like those of a recipe (`config.tree`).
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

from proxima.config.describe import FieldInfo, fields_of, root_field
from proxima.config.families import family_of
from proxima.config.problems import ConfigError, Problem, one_problem
from proxima.config.recipe_reader import read_recipe, read_yaml
from proxima.config.schema import RunConfig
from proxima.config.tree import Node, Source, merge
from proxima.data.errors import suggestion
from proxima.experiments.sweep_plan import Sweep, SweepCell
from proxima.system.user_files import find_recipe, shown_path

FIELDS = ("recipe", "folder", "seeds", "jobs", "set", "grid", "cells")
RESERVED = {"seed": "use seeds: [1, 2, 3]", "folder": "each run gets one below the sweep's own"}
UNSAFE = re.compile(r"[^A-Za-z0-9._=+,-]+")
LONGEST_NAME = 120  # characters of a cell's name; file systems take 255 bytes


def read_sweep(
    file: str | Path, *, folder: str | Path | None = None, jobs: int | None = None, only: Sequence[str] = ()
) -> Sweep:
    """Read a sweep file.

    Args:
        file: YAML, or the name of a sweep that comes with proxima; its fields are `recipe`, `folder`, `seeds`, `jobs`,
            `set`, `grid`, `cells`.
        folder, jobs: override those of the file.
        only: names of cells, or patterns like `*lr=1e-5`; the others are left out.
    Raises: ConfigError with a line for each mistake in the file itself; `plan_runs` validates the cells' configs.
    """
    file = find_recipe(file)
    if not file.is_file():
        message = "does not exist; give the path of a YAML file, or a sweep of `proxima list recipes`"
        raise one_problem(shown_path(file), message)
    root = read_yaml(file)
    keys = (root.mapping or {}).keys()
    if "recipe" not in keys and {"extends", "model"} & keys:
        raise one_problem(shown_path(file), "is a recipe; train it with proxima train, or name it in a sweep")
    reader = _SweepFileReader(file, root.mapping or {})
    recipe = reader.recipe()
    seeds = reader.seeds()
    jobs = reader.jobs(jobs)
    cells = reader.cells(recipe)
    if reader.problems:
        raise ConfigError(reader.problems)
    assert recipe is not None
    place = Path(folder) if folder else reader.folder()
    return Sweep(
        file=file,
        recipe=recipe,
        folder=place,
        seeds=seeds,
        jobs=jobs,
        cells=_matching(cells, only),
        all_cells=cells,
        settings={**root.to_python(), "recipe": shown_path(recipe)},
    )


def _matching(cells: tuple[SweepCell, ...], patterns: Sequence[str]) -> tuple[SweepCell, ...]:
    matching = set()
    for pattern in patterns:
        names = {cell.name for cell in cells if cell.name == pattern or fnmatch.fnmatchcase(cell.name, pattern)}
        if not names:
            raise one_problem("--only", f"{pattern!r} matches no cell; {suggestion(pattern, [c.name for c in cells])}")
        matching |= names
    return tuple(cell for cell in cells if not patterns or cell.name in matching)


class _SweepFileReader:
    """Reads the fields of a sweep file, and collects the mistakes in them."""

    def __init__(self, file: Path, fields: Mapping[str, Node]) -> None:
        self.file = file
        self.fields = fields
        self.problems: list[Problem] = []
        self.family: type = RunConfig  # of the recipe
        for key, node in fields.items():
            if key not in FIELDS:
                self.fail(key, f"a sweep has no field {key!r}; {suggestion(key, FIELDS)}", node)

    def fail(self, path: str, message: str, node: Node | None = None) -> None:
        value = source = None
        if node is not None:
            value = node.shown()
            source = node.source.text
        self.problems.append(Problem(path, message, value, source))

    def recipe(self) -> Path | None:
        node = self.fields.get("recipe")
        if node is None or not isinstance(node.value, str):
            self.fail("recipe", "must be the path or name of a recipe: recipe: quickstart", node)
            return None
        for place in (self.file.parent / node.value, find_recipe(node.value)):
            if place.exists():
                self.family = family_of(read_recipe(place)).root
                return _normalized(place)
        where = f"not found beside {shown_path(self.file)}, in the current folder or in `proxima list recipes`"
        self.fail("recipe", where, node)
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
        whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
        if not values or len(whole) < len(values):
            self.fail("seeds", "must be a list of whole numbers: seeds: [1, 2, 3]", node)
            return ()
        if len(set(whole)) != len(whole):
            self.fail("seeds", "repeats a seed, which would repeat the run; keep one", node)
        return tuple(whole)

    def jobs(self, override: int | None) -> int:
        node = self.fields.get("jobs")
        value: object = 1 if node is None else node.value
        if override is not None:
            node = None  # the file is not at fault
            value = override
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail("jobs", f"is {value!r}; must be a whole number >= 1: how many runs run at a time", node)
            return 1
        return value

    def cells(self, recipe: Path | None) -> tuple[SweepCell, ...]:
        info = root_field(self.family)
        common = self.layer("set", self.fields.get("set"))
        axes = self.axes()
        named = self.named()
        if self.problems:
            return ()
        short = _short_keys([key for key, _ in axes])
        cells: dict[str, SweepCell] = {}
        for name, fields in named or [("", Node({}, _source(self.file)))]:
            for values in itertools.product(*(values for _, values in axes)):
                grid = [(key, short[key], value) for (key, _), value in zip(axes, values, strict=True)]
                cell = _build_cell(name, fields, common, grid, info)
                if not cell.name:
                    only = recipe.stem if recipe else "recipe"
                    cell = replace(cell, name=_file_name(only))
                if cell.name in cells:
                    self.fail("cells", f"two cells have the name {cell.name!r}; name them under `cells`")
                cells[cell.name] = cell
        return tuple(cells.values())

    def mapping(self, path: str, node: Node | None, example: str) -> Mapping[str, Node]:
        """Return the entries of a field; empty if the file lacks it, and a problem if it is not a mapping."""
        if node is None or node.value is None:
            return {}
        if node.mapping is None:
            self.fail(path, f"must be a mapping of {example}", node)
        return node.mapping or {}

    def layer(self, path: str, node: Node | None) -> Node:
        """Return the tree of `{train.steps: 4, engine: {dtype: …}}`."""
        source = _source(self.file) if node is None else node.source
        tree = Node({}, source)
        entries = self.mapping(path, node, "dotted keys: {train.steps: 20}")
        for key, child in sorted(entries.items(), key=lambda pair: pair[0].count(".")):
            if self.is_valid_key(f"{path}.{key}", key, child):
                tree = merge(tree, _nested(key, child), root_field(self.family))
        return tree

    def is_valid_key(self, path: str, key: str, node: Node) -> bool:
        parts = key.split(".")
        section = parts[0]
        sections = [info.name for info in fields_of(self.family)]
        if key in RESERVED:
            problem = f"is set by the sweep: {RESERVED[key]}"
        elif not all(parts):
            problem = "has an empty part; write a dotted key like train.steps"
        elif section not in sections:
            problem = f"a recipe has no field {section!r}; {suggestion(section, sections)}"
        else:
            return True
        self.fail(path, problem, node)
        return False

    def axes(self) -> list[tuple[str, list[Node]]]:
        axes = []
        entries = self.mapping("grid", self.fields.get("grid"), "keys to lists: {algorithm: [grpo, cppo]}")
        for key, values in entries.items():
            if not self.is_valid_key(f"grid.{key}", key, values):
                continue
            if not values.items:
                self.fail(f"grid.{key}", "must be a list of values with at least one: [1e-5, 3e-5]", values)
            axes.append((key, values.items or []))
        return axes

    def named(self) -> list[tuple[str, Node]]:
        cells = self.mapping("cells", self.fields.get("cells"), "names to values: {grpo_16: {algorithm: grpo}}")
        for name, child in cells.items():
            if UNSAFE.search(name) or name.startswith((".", "-")) or len(name) > LONGEST_NAME:
                rule = "use letters, digits and . _ - = + , and start with neither . nor -"
                self.fail(f"cells.{name}", f"can't name a folder; {rule}", child)
        return [(name, self.layer(f"cells.{name}", child)) for name, child in cells.items()]


def _normalized(place: Path) -> Path:
    """Return `recipes/a.yaml` for `mine/../recipes/a.yaml`, unless they are different files because of a link."""
    plain = Path(os.path.normpath(place))
    if plain.exists() and plain.samefile(place):
        return plain
    return place


def _source(file: Path) -> Source:
    return Source(shown_path(file))


def _nested(key: str, node: Node) -> Node:
    for part in reversed(key.split(".")):
        node = Node({part: node}, node.source)
    return node


def _build_cell(
    name: str, fields: Node, common: Node, grid: Sequence[tuple[str, str, Node]], info: FieldInfo
) -> SweepCell:
    """Merge `set`, then the value of each axis (as key, short key, value), then the fields under the cell's name."""
    parts = [name] if name else []
    tree = merge(Node({}, fields.source), common, info)
    for key, short, value in grid:
        parts.append(f"{short}={_value_name(value)}")
        tree = merge(tree, _nested(key, value), info)
    tree = merge(tree, fields, info)
    overrides: list[str] = []
    for path, node in _leaves("", tree, info):
        text = f"{path}={json.dumps(node.to_python(), ensure_ascii=False, allow_nan=True)}"
        overrides.append(re.sub(r"\bInfinity\b", ".inf", text))
    return SweepCell(name=_file_name(",".join(parts)), layer=tree, overrides=tuple(overrides))


def _leaves(path: str, node: Node, info: FieldInfo) -> Iterable[tuple[str, Node]]:
    """Yield lists and scalars with their dotted paths. A slot's kind precedes its fields, because it resets them."""
    if not node.mapping:
        if path:
            yield path, node
        return
    for key in sorted(node.mapping, key=lambda key: key != info.head):
        place = f"{path}.{key}" if path else key
        yield from _leaves(place, node.mapping[key], info.child(key))


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return each dotted key → its shortest suffix that no other key has: `train.optimizer.lr` → `lr`."""
    short = {}
    for key in keys:
        parts = key.split(".")
        suffixes = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next((s for s in suffixes if not any(other.endswith(f".{s}") for other in others)), key)
    return short


def _value_name(node: Node) -> str:
    """Return a value as it appears in a cell's name: a scalar as written, a spec as its kind and its fields."""
    if node.mapping is not None:
        head = node.mapping.get("preset") or node.mapping.get("kind")
        parts = [f"{key}={_value_name(child)}" for key, child in node.mapping.items() if child is not head]
        if head:
            parts.insert(0, _value_name(head))
        return "-".join(parts) or "empty"
    if node.items is not None:
        return "+".join(map(_value_name, node.items)) or "none"
    written = node.value if node.text is None else node.text
    return str(written) or "empty"


def _file_name(name: str) -> str:
    name = UNSAFE.sub("_", name)
    if len(name) <= LONGEST_NAME:
        return name
    digest = sha256(name.encode()).hexdigest()
    return f"{name[: LONGEST_NAME - 9]}-{digest[:8]}"
