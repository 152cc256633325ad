"""All rooms, the places where a file of them can be changed, and its text with one of these changes."""

import ast
import builtins
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
PACKAGES = ("peers", "plan", "tinker", "worlds")


def rooms(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Return the folder of the sources and that of the tests of each room of `proxima`, and of each package."""
    names = sorted(init.parent.name for init in (root / "src" / "proxima").glob("*/__init__.py"))
    own = {name: (f"src/proxima/{name}", f"tests/{name}") for name in names}
    beside = {
        name: (f"packages/proxima-{name}/src/proxima_{name}", f"packages/proxima-{name}/tests") for name in PACKAGES
    }
    return own | beside


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
Edit = tuple[Any, ast.AST]  # a node, and what replaces it


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Change number `site` of the file at `path`, in this line; `name` is unique and survives other edits."""

    room: str
    path: str
    site: int
    line: int
    name: str

    def drawn(self, seed: int) -> bytes:
        """Return the place in the order in which a sample is drawn; it depends on nothing but the name."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).digest()


def percent_off(result: Any) -> Any:
    """Return the result of a spec, 1 % too large."""
    for field in ("loss", "weight"):
        if hasattr(result, field):
            return dataclasses.replace(result, **{field: getattr(result, field) * 1.01})
    if isinstance(result, tuple):
        return (result[0] * 1.01, *result[1:])
    return result * 1.01


def _changed(node: ast.AST, **fields: Any) -> ast.AST:
    out = copy.copy(node)
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def sign_changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the versions of a node with another sign."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS:
        yield _changed(node, op=SIGNS[type(node.op)]())
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SIGNS:
                yield _changed(node, ops=[*node.ops[:i], SIGNS[type(op)](), *node.ops[i + 1 :]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield _changed(node, op=ast.UAdd())


def result_changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the `return` of a spec whose result is 1 % too large."""
    if isinstance(node, ast.Return) and node.value is not None:
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


def edits(tree: ast.Module, specs: bool = False) -> Iterator[tuple[Edit, str, int]]:
    """Yield every change with its function and its line. Errors and other messages, imports, annotations and decorators
    are left as they are.

    Args:
        specs: whether what `__call__` returns is the result of a spec, which may be 1 % too large.
    """

    def within(parent: ast.AST, scope: str, check: bool = False) -> Iterator[Any]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            inner = scope
            if field == "body" and isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = f"{scope}.{getattr(parent, 'name', 'lambda')}()"
            elif field == "body" and isinstance(parent, ast.ClassDef):
                inner = f"{scope}.{parent.name}"
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.AST) and not isinstance(node, NOT_COMPUTED) and not _is_case(node):
                    checks = check or _is_check(node)
                    found = list(sign_changes(node))
                    if specs and inner.endswith(".__call__()"):
                        found += result_changes(node)
                    if not checks:
                        found += other_changes(node)
                    for new in found:
                        yield (node, new), inner, node.lineno  # type: ignore[attr-defined]
                    yield from within(node, inner, checks)

    return within(tree, "")


def _is_case(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in CASES


def _is_check(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CHECKS


def mutated_source(text: str, site: int, specs: bool = False) -> str:
    """Return the text of a module with one change; all else in it stays, comments too.

    Args:
        site: the number of the change.
        specs: as of `edits`.
    """
    node, new = next(islice(edits(ast.parse(text), specs), site, None))[0]
    written = ast.unparse(new)
    if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Name | ast.Attribute | ast.Call):
        written = f"({written})"
    lines = text.encode().splitlines(keepends=True)  # columns are of bytes
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = text.encode()
    changed = (whole[:begin] + written.encode() + whole[end:]).decode()
    if "percent_off(" in written:
        changed += "\nfrom scripts.mutations import percent_off\n"
    return changed


def mutants_of(room: str, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield all mutants of a room."""
    folder = root / rooms(root)[room][0]
    for file in sorted(folder.rglob("*.py")):
        seen: Counter[str] = Counter()
        found = edits(ast.parse(file.read_text(encoding="utf-8")), specs=room == "core")
        for site, ((node, new), scope, line) in enumerate(found):
            name = f"{file.relative_to(folder.parent)}{scope}  {ast.unparse(node)}  ->  {ast.unparse(new)}"
            seen[name] += 1
            if seen[name] > 1:
                numbered = f"{name}  ({seen[name]})"
            else:
                numbered = name
            yield Mutant(room, str(file.relative_to(root)), site, line, numbered)


def sample(seed: int, each: int, root: Path = ROOT) -> list[Mutant]:
    """Return `each` mutants of every room, and one more for every 2,000 that the room has. The first of every room
    come first, then the second of every room, so that a part of the sample is one too."""
    drawn: list[tuple[int, Mutant]] = []
    for room in rooms(root):
        mutants = sorted(mutants_of(room, root), key=lambda mutant: mutant.drawn(seed))
        drawn += enumerate(mutants[: each + len(mutants) // 2000])
    drawn.sort(key=lambda numbered: numbered[0])
    return [mutant for _, mutant in drawn]
