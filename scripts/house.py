"""Check house rules that ruff, mypy and import-linter don't cover: `python scripts/house.py [--room ROOM]`.

    sizes          a function has at most 80 lines (docstring not counted), a constructor 8 parameters (frozen
                   dataclasses are values and may have more)
    names          a class, a public function and a module name mean one thing in their room
    circles        no module imports itself through others
    imports        imports of our own stand at the top of a file, except at the seams of `ALLOWED_LATE_IMPORTS`; blocks
                   `if TYPE_CHECKING`, which hide imports too, are few
    unreachable    every definition is reached by a run, a command or the public API
    rooms          the `__init__` of a room holds its table; it defines no function or class
    encodings      who opens text says its encoding, in the packages and in the programs beside them
    platform       what only Linux has is in the modules that have an alternative, or need Linux; see `portable`
    clients        clients of HTTP servers are made in one module

Exit code 1 if a rule is broken. Files of more than 400 lines are listed, but break no rule. `ALLOWED_*` below hold the
exceptions, each with its reason.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # as a program, its folder alone would be there

from scripts import portable  # noqa: E402

OTHERS = ("peers", "plan", "tinker", "worlds")  # the other distributions
PACKAGES = (
    REPOSITORY / "src" / "proxima",
    *(REPOSITORY / "packages" / f"proxima-{name}" / "src" / f"proxima_{name}" for name in OTHERS),
)
FILE_LINES = 400
FUNCTION_LINES = 80
PARAMETERS = 8
LATE_IMPORTS, TYPE_CHECKING_BLOCKS = 42, 25  # in src

# Rooms whose `__all__` is public API: what an out-of-tree package may import.
PUBLIC_ROOMS = tuple(
    f"proxima{room}"
    for room in ("", ".data", ".core", ".engine", ".engine.http", ".environment", ".reward", ".task", ".check")
)
ALLOWED_MODULES = {
    "protocol": "every room with a protocol keeps it in protocol.py",
    "reward": "the command, and a file that `proxima init` writes",
    "unirl": "what one peer's numbers and options mean",
    "verl": "what one peer's numbers and options mean",
    "trl": "what one peer's numbers and options mean",
    "prime_rl": "what one peer's numbers and options mean",
    "areal": "what one peer's numbers and options mean",
}
ALLOWED_FUNCTIONS = {
    "convert": "the protocol of a peer's converter: every one has a `convert(options)`",
    "training_of": "the protocol of a peer's trainings without rewards",
    "convert_offline": "the protocol of a peer's trainings without rewards",
    "rules_of": "the protocol of a peer's trainings without rewards",
    "main": "what a console script or a spawned process starts",
}
ALLOWED_CLASSES: dict[str, str] = {}
ALLOWED_LOGIC = {
    "proxima": "calls the functions of `proxima.api`, which importing it must not import",
    "proxima.view": "the views of a run",
    "proxima_peers.convert": "a peer, beside the table of them",
}
ALLOWED_UNREACHABLE = {"of_sets": "how engines that are servers read a sampling mask"}
ALLOWED_UNREACHABLE |= dict.fromkeys(("calculate", "python", "query", "search"), "a tool: the model calls it")
ALLOWED_UNREACHABLE |= dict.fromkeys(
    ("brief_answer", "right_number", "right_words", "shared_words"),
    "a file that `proxima init` writes; its recipe names it",
)
ALLOWED_UNREACHABLE |= {"capture_signals": "overrides uvicorn's, which takes the signals of the run"}
ALLOWED_UNREACHABLE |= {"_format_action": "overrides argparse's, which knows no groups of commands"}
_HOOKS = "users of `Executor` register hooks, and so will the segment-wise recompute; the loop itself has none"
ALLOWED_UNREACHABLE |= dict.fromkeys(
    (
        "RemoveHook",
        "_register",
        "register_pre_pause_hook",
        "register_post_pause_hook",
        "register_pre_resume_hook",
        "register_post_resume_hook",
    ),
    _HOOKS,
)

_COMMAND = "a command's module has its options, which `--help` and a mistyped option read without what does the work"
_SHELL = "only some command lines need it"
#: imports of our own inside functions of src, "importing module: imported module", each with the seam that allows it
ALLOWED_LATE_IMPORTS = dict.fromkeys(
    (
        "proxima.cli.check: proxima.laws.spec_check",
        "proxima.cli.check: proxima.runtime.state.folder_check",
        "proxima.cli.compare: proxima.view.comparison_files",
        "proxima.cli.data: proxima.api.episode_chat",
        "proxima.cli.data: proxima.prepare",
        "proxima.cli.data: proxima.prepare.dataset_card",
        "proxima.cli.doctor: proxima.kernels.compiled",
        "proxima.cli.doctor: proxima.model.precision",
        "proxima.cli.engine: proxima.cli.engine_diagnosis",
        "proxima.cli.engine: proxima.cli.serving",
        "proxima.cli.engine: proxima.engine.http.detect",
        "proxima.cli.engine: proxima.engine.serve",
        "proxima.cli.eval: proxima.api.evaluation",
        "proxima.cli.eval: proxima.view",
        "proxima.cli.explain: proxima.cli.explanation",
        "proxima.cli.export: proxima.runtime.state.run_checkpoints",
        "proxima.cli.generate: proxima.cli",
        "proxima.cli.init: proxima.cli.own_data",
        "proxima.cli.plot: proxima.view",
        "proxima.cli.plot: proxima.view.token_plots",
        "proxima.cli.reward: proxima.cli.scoring",
        "proxima.cli.reward: proxima.cli.serving",
        "proxima.cli.submit: proxima.config",
        "proxima.cli.sweep: proxima.view.sweep_progress",
        "proxima.cli.train: proxima.cli.train_run",
        "proxima.cli.view: proxima.view.microscope",
    ),
    _COMMAND,
)
ALLOWED_LATE_IMPORTS |= {
    "proxima.cli.commands: proxima.config.families": f"{_SHELL}: a word that argparse leaves over",
    "proxima.cli.main: proxima.cli.exit_codes": f"{_SHELL}: one that fails",
    "proxima.cli.main: proxima.cli.help_page": f"{_SHELL}: one without a command",
    "proxima.cli.main: proxima.runtime.placement.launcher": f"{_SHELL}: a task of Slurm",
    "proxima.api.run_start: proxima.runtime.placement.ray_supervisor": "of the extra ray",
    "proxima.api.saved: proxima.api.metrics_frame": "derives from a class of pandas",
    "proxima.cli.train_run: proxima.view.eval_tables": "a table of rich, which only a reward model's run prints",
    "proxima.cli.train_run: proxima.view.terminal": "likewise",
    "proxima.rollout.episodes.worlds: proxima.rollout.episodes.agent_player": "serves by starlette, of the extra serve",
    "proxima.rollout.episodes.session_kind: proxima.rollout.episodes.session_routes": "likewise",
    "proxima.reward.workers.graders: proxima.reward.workers": "runs code: other rewards load no sandbox",
    "proxima.reward.workers.graders: proxima.process": "likewise",
    "proxima.environment.host_process: proxima.process.code_runner": "likewise, of environments",
    "proxima.model.adapters.lora: proxima.model.adapters.merged_lora": "derives from a class of peft",
    "proxima.runtime.placement.rendezvous: proxima.training.sharded_checkpoint": "derives from one of torch",
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))


def room_of(module: str) -> str:
    package, _, inside = module.partition(".")
    if package != "proxima" or not inside:
        return package
    return inside.partition(".")[0]


@dataclass
class Unit:
    """A definition that is reached on its own: a function, a class without its methods, a method, a constant."""

    name: str
    where: str
    room: str
    owner: "Unit | None" = None
    automatic: bool = False  # reached with its owner: dunder methods, overrides of foreign bases
    mentions: set[str] = field(default_factory=set)
    reached: bool = False


@cache
def read_modules() -> list[Module]:
    modules = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            modules.append(Module(name, path, text, ast.parse(text)))
    return modules


def short(module: Module) -> str:
    own = PACKAGES[0]
    return str(module.path.relative_to(own if module.path.is_relative_to(own) else REPOSITORY))


# sizes


def oversized(modules: list[Module]) -> Iterator[tuple[str, str]]:
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (size := length(node)) > FUNCTION_LINES:
                yield module.room, f"{short(module)}: function {node.name} has {size} lines"
            if isinstance(node, ast.ClassDef) and (count := constructor_parameters(node)) > PARAMETERS:
                yield module.room, f"{short(module)}: constructor of {node.name} has {count} parameters"


def long_files(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield files that may have more than one subject."""
    for module in modules:
        lines = module.text.count("\n")
        if lines > FILE_LINES:
            yield module.room, f"{short(module)}: {lines} lines"


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function without its docstring."""
    first = node.body[0]
    docstring = ast.get_docstring(node, clean=False) is not None
    documented = 0
    if docstring:
        documented = (first.end_lineno or 0) - first.lineno + 1
    return (node.end_lineno or 0) - node.lineno + 1 - documented


def constructor_parameters(node: ast.ClassDef) -> int:
    """Count the arguments of the class's constructor; 0 for a frozen dataclass, which is a value."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = item.args
            return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any("dataclass" in decorator for decorator in decorators) or any(
        "frozen=True" in decorator for decorator in decorators
    ):
        return 0
    return sum(
        isinstance(item, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(item.annotation)
        and "init=False" not in ast.unparse(item)
        for item in node.body
    )


# names


def ambiguous_names(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield the names that two modules of a room give to different things."""
    for room in sorted({module.room for module in modules}):
        yield from _ambiguous_in_room([module for module in modules if module.room == room])


def _ambiguous_in_room(modules: list[Module]) -> Iterator[tuple[str, str]]:
    classes, functions, files = defaultdict(list), defaultdict(list), defaultdict(list)
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(module)
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                functions[node.name].append(module)
        if module.path.name != "__init__.py" and not module.path.stem.startswith("__"):
            files[module.path.stem].append(module)
    for kind, table, allowed in (
        ("class", classes, ALLOWED_CLASSES),
        ("function", functions, ALLOWED_FUNCTIONS),
        ("module", files, ALLOWED_MODULES),
    ):
        for name, places in sorted(table.items()):
            if table is functions:
                places = list({module.name: module for module in places}.values())
            if len(places) > 1 and name not in allowed:
                where = ", ".join(short(module) for module in places)
                yield places[0].room, f"{kind} {name}: {where}"


# circles


def circles(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield one group of modules that import one another, imports inside functions included."""
    import grimp

    sys.path[:0] = [str(package.parent) for package in PACKAGES]  # those of this checkout, installed or not
    graph = grimp.build_graph(*(package.name for package in PACKAGES), cache_dir=None)
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        circle = error.args[1][1:]  # its first module is its last one, too
        for room in sorted({room_of(name) for name in circle}):
            yield room, " ⇄ ".join(name.removeprefix("proxima.") for name in sorted(circle))


# imports


def late_imports(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield imports of our own inside functions of src that no seam allows, seams that have none, and too many of
    either or of blocks `if TYPE_CHECKING`."""
    own = [module for module in modules if module.name.partition(".")[0] == "proxima"]
    late = {
        f"{module.name}: {imported}": (module, line)
        for module in own
        for imported, line in imported_in_functions(module)
    }
    count = sum(1 for module in own for _ in imported_in_functions(module))
    for name, (module, line) in late.items():
        if name not in ALLOWED_LATE_IMPORTS:
            imported = name.partition(": ")[2]
            yield module.room, f"{short(module)}:{line}: imports {imported} inside a function; import it at the top"
    for name in sorted(ALLOWED_LATE_IMPORTS.keys() - late.keys()):
        yield room_of(name.partition(":")[0]), f"ALLOWED_LATE_IMPORTS names {name}, which is no more"
    if count > LATE_IMPORTS:
        yield "proxima", f"{count} imports of our own inside functions, at most {LATE_IMPORTS}"
    blocks = sum(
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for module in own
        for node in module.nodes
    )
    if blocks > TYPE_CHECKING_BLOCKS:
        yield "proxima", f"{blocks} blocks `if TYPE_CHECKING`, at most {TYPE_CHECKING_BLOCKS}"


def imported_in_functions(module: Module) -> list[tuple[str, int]]:
    """The modules of ours that statements inside functions import, each with its line."""
    inside = {
        id(node): node
        for function in module.nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    collected = []
    for node in inside.values():
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        collected += [(name, node.lineno) for name in names if name.partition(".")[0] == "proxima"]
    return collected


# unreachable


def unreachable(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield definitions whose name no reached code mentions. By name alone: a name that two share keeps both."""
    units, roots = collect(modules)
    by_name: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        by_name[unit.name].append(unit)
    pending = sorted(roots)
    mentioned = set(pending)

    def visit(unit: Unit) -> None:
        if unit.reached or not (unit.owner is None or unit.owner.reached):
            return
        if not unit.automatic and unit.name not in mentioned:
            return
        unit.reached = True
        pending.extend(unit.mentions - mentioned)
        mentioned.update(unit.mentions)
        for other in units_of.get(id(unit), ()):
            visit(other)

    units_of: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        units_of[id(unit.owner)].append(unit)
    while pending:
        for unit in by_name[pending.pop()]:
            visit(unit)
    for unit in units:
        if not unit.reached and (unit.owner is None or unit.owner.reached) and unit.name not in ALLOWED_UNREACHABLE:
            yield unit.room, unit.where


def collect(modules: list[Module]) -> tuple[list[Unit], set[str]]:
    """Return all units, and the names that are reached from outside: commands, module-level code, public `__all__`s and
    docs/bias.md."""
    units: list[Unit] = []
    bias_page = (REPOSITORY / "scripts" / "bias_page.py").read_text(encoding="utf-8")
    roots = {"main"} | entry_points() | names_in(ast.parse(bias_page))
    own_classes = {node.name for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, Definition):
                collect_definition(node, module, None, units, own_classes)
                if node.name.startswith("__"):
                    roots.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                continue
            elif (target := constant(node)) is not None:
                if target == "__all__":
                    if module.name in PUBLIC_ROOMS:
                        roots |= names_in(node)
                elif not target.startswith("__"):
                    units.append(
                        Unit(target, f"{short(module)}: {target}", module.room, mentions=names_in(node) - {target})
                    )
            elif not is_docstring(node):
                roots |= names_in(node)
    return units, roots


def entry_points() -> set[str]:
    """The names that the entry points of the packages mention."""
    roots: set[str] = set()
    for file in sorted(REPOSITORY.glob("packages/*/pyproject.toml")):
        groups = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        roots |= {place.rpartition(":")[2] for group in groups.values() for place in group.values()}
    return roots


def collect_definition(
    node: Definition, module: Module, owner: Unit | None, units: list[Unit], own_classes: set[str]
) -> None:
    if owner is None:
        label = node.name
    else:
        label = f"{owner.name}.{node.name}"
    unit = Unit(node.name, f"{short(module)}:{node.lineno}: {label}", module.room, owner)
    unit.automatic = re.fullmatch(r"__\w+__", node.name) is not None
    units.append(unit)
    if not isinstance(node, ast.ClassDef):
        unit.mentions = names_in(node) - {node.name}
        return
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    foreign = any(base not in own_classes and base not in ("object", "ABC", "Generic") for base in bases)
    for part in (*node.bases, *node.decorator_list, *node.keywords):
        unit.mentions |= names_in(part)
    for item in node.body:
        if isinstance(item, Definition):
            collect_definition(item, module, unit, units, own_classes)
            units[-1].automatic |= foreign
        else:
            unit.mentions |= names_in(item)


def constant(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def names_in(node: ast.AST) -> set[str]:
    """Return identifiers, attributes, keywords, imported names, and those in strings such as `"pkg.module:Class"`."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.keyword) and part.arg:
            names.add(part.arg)
        elif isinstance(part, ast.alias):
            names.add(part.name.rpartition(".")[2])
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) < 120:
            names.update(re.findall(r"[A-Za-z_]\w*", part.value) if re.fullmatch(r"[\w.:\[\], |]+", part.value) else ())
    return names


# rooms


def logic_in_rooms(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield functions and classes that an `__init__` defines."""
    for module in modules:
        if module.path.name == "__init__.py" and module.name not in ALLOWED_LOGIC:
            names = [node.name for node in module.tree.body if isinstance(node, Definition)]
            if names:
                yield module.room, f"{short(module)}: {', '.join(names)}"


# what differs from one computer to another


def locale_texts(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield calls that read or write text in the encoding of the user's locale."""
    for module in modules:
        for text in portable.unspecified_encodings(short(module), module.nodes):
            yield module.room, text
    for folder in portable.FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            for text in portable.unspecified_encodings(str(path.relative_to(REPOSITORY)), nodes):
                yield folder, text


def linux_only(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield calls and files that only Linux has."""
    for module in modules:
        if module.name not in portable.LINUX:
            for text in portable.linux_calls(short(module), module.nodes):
                yield module.room, text
    for name in sorted(portable.LINUX.keys() - {module.name for module in modules}):
        yield room_of(name), f"portable.LINUX names {name}, which is no more"


def stray_clients(modules: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield clients of HTTP servers that other modules make."""
    for module in modules:
        if module.name != portable.CLIENTS and module.name not in portable.ALLOWED_CLIENTS:
            for text in portable.http_clients(short(module), module.nodes):
                yield module.room, text


RULES = {
    "encodings": locale_texts,
    "platform": linux_only,
    "clients": stray_clients,
    "sizes": oversized,
    "names": ambiguous_names,
    "circles": circles,
    "imports": late_imports,
    "unreachable": unreachable,
    "rooms": logic_in_rooms,
}


def violations(room: str | None = None) -> dict[str, list[str]]:
    """Return the violations of each rule, in one room or in all."""
    modules = read_modules()
    return {
        rule: sorted({text for place, text in check(modules) if room in (None, place)}) for rule, check in RULES.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", help="only what concerns this room, for example train")
    parser.add_argument("--lines", action="store_true", help="print the number of lines of each room")
    options = parser.parse_args()
    problems = violations(options.room)
    for rule, texts in problems.items():
        print(f"{rule}: {len(texts)}")
        for text in texts:
            print(f"  {text}")
    warned = [text for room, text in long_files(read_modules()) if options.room in (None, room)]
    print(f"long files: {len(warned)} (no error)")
    for text in warned:
        print(f"  {text}")
    if options.lines:
        lines = Counter[str]()
        for module in read_modules():
            lines[module.room] += module.text.count("\n")
        for room, count in sorted(lines.items()):
            print(f"{room:<14}{count:>7,}")
        print(f"{'total':<14}{sum(lines.values()):>7,}")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
