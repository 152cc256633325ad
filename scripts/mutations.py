"""The rooms that compute, where a file of them can be changed in one place, and its code with one of these changes."""

import ast
import builtins
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src" / "proxima", *(ROOT / "packages" / f"proxima-{name}" / "src" for name in ("plan", "tinker")))
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
CORE = "src/proxima/core"
# Sampling and scheduling; what serves, launches and talks to servers does not compute.
ENGINE = "decoder decoders fast_decoder general_decoder kv_cache local_engine sampler scheduler"
ENGINE = [
    f"src/proxima/engine/{name}.py" for name in ("engine_selection", *(f"local/{name}" for name in ENGINE.split()))
]
PLAN, TINKER = "packages/proxima-plan/src/proxima_plan", "packages/proxima-tinker/src/proxima_tinker"
FORMULAS = "engine_settings forecast layout memory model_size proposals stage_times step_load traffic simulation"
# room → its sources, and its tests
ROOMS: dict[str, tuple[list[str], list[str]]] = {
    "core": ([CORE], ["tests/core"]),
    "data": (["src/proxima/data"], ["tests/data"]),
    "engine": (ENGINE, ["tests/engine"]),
    "evaluation": (["src/proxima/evaluation"], ["tests/evaluation"]),
    "plan": ([f"{PLAN}/{name}" for name in FORMULAS.split()], ["packages/proxima-plan/tests"]),
    "rollout": (["src/proxima/rollout"], ["tests/rollout"]),
    "tinker": (
        [f"{TINKER}/{name}.py" for name in ("datum", "losses", "trained_model")],
        ["packages/proxima-tinker/tests"],
    ),
    "training": (["src/proxima/training"], ["tests/training"]),
}
COMPARISONS = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
LOGIC = ((ast.And, ast.Or), (ast.BitAnd, ast.BitOr))
OPERATORS = {a: b for x, y in (*COMPARISONS, *LOGIC, (ast.Mult, ast.Div)) for a, b in ((x, y), (y, x))}
OPERATORS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)
PAIRS = (
    ("min", "max"),
    ("amin", "amax"),
    ("minimum", "maximum"),
    ("all", "any"),
    ("sum", "mean"),
    ("argmin", "argmax"),
)
EXCHANGED = {name: other for a, b in PAIRS for name, other in ((a, b), (b, a))}
SYMMETRIC = {*EXCHANGED, "logaddexp", "lcm", "gcd", "equal", "isclose"}  # of their first two arguments
NOT_COMPUTED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
CASES = {"test_fields", "examples"}  # of the laws
CHECKS = {"require", "check_choices"}  # they only refuse input: signs are changed in them, and nothing else
# node, what replaces it, its parent, field, place in the field
Edit = tuple[ast.AST, ast.AST, ast.AST, str, int | None]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Change number `site` of a file, in the statement at these lines; `name` is unique and survives other edits."""

    path: str
    site: int
    lines: tuple[int, int]
    name: str
    signs: bool = False  # the change of a sign or of a spec's result

    @property
    def file(self) -> Path:
        return ROOT / self.path

    @property
    def scope(self) -> str:
        return self.name.split("  ")[0]

    @property
    def in_function(self) -> bool:
        return "()" in self.scope

    @property
    def in_statement(self) -> bool:
        """False outside functions, and in a lambda, which runs when its statement does not."""
        return self.in_function and "lambda()" not in self.scope

    @property
    def change(self) -> str:
        """The name without its file: it stays when the function moves to another."""
        return self.name.partition(".py")[2]

    def drawn(self, seed: int) -> bytes:
        """The place in the order in which a sample is drawn; it depends on nothing but the name."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).digest()


def _changed(node: ast.AST, **fields: Any) -> ast.AST:
    out = copy.copy(node)
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def sign_changes(node: ast.AST, scope: str) -> Iterator[ast.AST]:
    """Yield the versions of a node with another sign, or of a spec's result that is 1 % too large."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS:
        yield _changed(node, op=SIGNS[type(node.op)]())
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SIGNS:
                yield _changed(node, ops=[*node.ops[:i], SIGNS[type(op)](), *node.ops[i + 1 :]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield _changed(node, op=ast.UAdd())
    if isinstance(node, ast.Return) and node.value is not None and scope.endswith(".__call__()"):
        yield _changed(node, value=ast.Call(ast.Name("percent_off", ast.Load()), [node.value], []))


def other_changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the versions of a node with another operator, number, branch or function, or without a statement."""
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in OPERATORS:
            yield _changed(node, op=OPERATORS[type(node.op)]())
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield _changed(node, ops=[OPERATORS[type(op)]()])
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.IfExp():
            yield _changed(node, body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool()):
            yield _changed(node, value=not node.value)
        case ast.Constant(value=int()):
            yield _changed(node, value=node.value + 1)
        case ast.Constant(value=float()):
            yield _changed(node, value=2 * node.value or 1.0)
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *rest]) if _name(node.func) not in SYMMETRIC:
            yield _changed(node, args=[second, first, *rest])
        case ast.Name(id=name) if name in EXCHANGED and hasattr(builtins, EXCHANGED[name]):
            yield _changed(node, id=EXCHANGED[name])
        case ast.Attribute(attr=name) if name in EXCHANGED:
            yield _changed(node, attr=EXCHANGED[name])
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.copy_location(ast.Pass(), node)


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def edits(tree: ast.Module) -> Iterator[tuple[Edit, str, tuple[int, int], bool]]:
    """Yield every change with its function, the lines of its statement, and whether it is that of a sign. Errors and
    other messages, imports, annotations and decorators are left as they are."""

    def within(parent: ast.AST, scope: str, lines: tuple[int, int] | None, check: bool = False) -> Iterator[Any]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            inner = scope
            if field == "body" and isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = f"{scope}.{getattr(parent, 'name', 'lambda')}()"
            elif field == "body" and isinstance(parent, ast.ClassDef):
                inner = f"{scope}.{parent.name}"
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST) and not isinstance(node, NOT_COMPUTED) and not _is_case(node):
                    own = lines or (node.lineno, node.end_lineno) if hasattr(node, "lineno") else lines
                    checks = check or _is_check(node)
                    for new in sign_changes(node, inner):
                        yield (node, new, parent, field, place), inner, own, True
                    for new in () if checks else other_changes(node):
                        yield (node, new, parent, field, place), inner, own, False
                    simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
                    yield from within(node, inner, own if simple or lines else None, checks)

    return within(tree, "", None)


def _is_case(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in CASES


def _is_check(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CHECKS


def mutated_tree(file: Path, site: int) -> ast.Module:
    """Return a module with one change."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (_, new, parent, field, place), *_ = next(edit for i, edit in enumerate(edits(tree)) if i == site)
    if place is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[place] = new
    return ast.fix_missing_locations(tree)


def mutated(file: Path, site: int) -> CodeType:
    """Return the code of a module with one change."""
    return compile(mutated_tree(file, site), str(file), "exec")


def marked(file: Path, first: int) -> tuple[CodeType, list[tuple[int, int]]]:
    """Return the code of a module in which every statement of a function first calls `__seen__` with its number, and
    the lines of these statements, numbered from `first`."""
    tree, places = ast.parse(file.read_text(encoding="utf-8")), list[tuple[int, int]]()

    def with_marks(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in statements:
            inner = getattr(node, "body", None) or getattr(node, "cases", None)
            last = node.end_lineno if inner is None else max(node.lineno, _first_line(inner[0]) - 1)
            number = ast.Constant(first + len(places))
            places.append((node.lineno, last))
            yield ast.copy_location(ast.Expr(ast.Call(ast.Name("__seen__", ast.Load()), [number], [])), node)
            yield node

    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for block in {id(inner): inner for function in functions for inner in ast.walk(function)}.values():
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(block, field, None)
            if isinstance(statements, list):
                setattr(block, field, [*with_marks(statements)])
    return compile(ast.fix_missing_locations(tree), str(file), "exec"), places


def _first_line(node: Any) -> int:
    return int(getattr(node, "lineno", None) or node.pattern.lineno)


def mutants_of(file: Path, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree, path = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(root)
    short = next((file.relative_to(source) for source in SOURCES if file.is_relative_to(source)), path)
    seen: Counter[str] = Counter()
    for site, ((node, new, *_), scope, lines, signs) in enumerate(edits(tree)):
        name = f"{short}{scope}  {ast.unparse(node)}  ->  {ast.unparse(new)}"
        seen[name] += 1
        yield Mutant(str(path), site, lines, f"{name}  ({seen[name]})" if seen[name] > 1 else name, signs)


def files_of(room: str) -> list[Path]:
    """Return the files of a room that are mutated, sorted."""
    places = [ROOT / name for name in ROOMS[room][0]]
    found = (p.rglob("*.py") if p.is_dir() else [p if p.suffix else p.with_suffix(".py")] for p in places)
    return sorted(path for paths in found for path in paths)


@cache
def sources() -> frozenset[str]:
    """Return the files of all rooms."""
    return frozenset(str(file) for room in ROOMS for file in files_of(room))


def sample(room: str, size: int | None, seed: int, recorded: Sequence[str] = ()) -> list[Mutant]:
    """Return a sample of a room's mutants; a larger one contains a smaller one, and None is all of them.

    Args:
        recorded: names of a former sample. Those whose change still exists come first, in whatever file it is now.
    """
    mutants = sorted((mutant for file in files_of(room) for mutant in mutants_of(file)), key=lambda m: m.drawn(seed))
    names = {mutant.name: mutant for mutant in mutants}
    changes = Counter(mutant.change for mutant in mutants)
    moved = {mutant.change: mutant for mutant in mutants if changes[mutant.change] == 1}
    kept = [names.get(name) or moved.get(name.partition(".py")[2]) for name in recorded]
    return list(dict.fromkeys([*(mutant for mutant in kept if mutant), *mutants]))[:size]
