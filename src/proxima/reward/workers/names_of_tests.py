"""Whose names are those that tests use: the code's, or their own.

Tests judge with `math`, `np` or a helper, so a completion must not define these. The code gives the function under
test: with an entry point this one alone; else each name that the tests leave free, unless it is a module by its use, or
is called around what they call of the code, as `poly(xs, find_zero(xs))`: such a helper belongs into the row's setup.
"""

import ast
import builtins
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SHORT = {"np": "numpy", "pd": "pandas", "nx": "networkx", "sp": "scipy", "plt": "matplotlib.pyplot", "tf": "tensorflow"}
PACKAGES = ("numpy", "pandas", "networkx", "scipy", "torch", "sympy", "sklearn", "pytest", "requests")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def module_named(name: str) -> str:
    """The module that tests mean by a name; empty: none."""
    if name in SHORT or name in PACKAGES:
        return SHORT.get(name, name)
    if name in sys.stdlib_module_names:
        return name
    return ""


class Names:
    """The names in the sources of tests, read without running them.

    Args:
        sources: of the tests.
        given: names that the row's setup defines.
    """

    def __init__(self, sources: Iterable[str], given: Iterable[str]) -> None:
        self.nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
        bound = {node.id for node in self.nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        bound |= {node.name for node in self.nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        bound |= {(node.asname or node.name).partition(".")[0] for node in self.nodes if isinstance(node, ast.alias)}
        bound |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        read = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        self.free = read - bound - set(given)
        bases = [node.value for node in self.nodes if isinstance(node, ast.Attribute)]
        alone = {node.id for node in self.nodes if isinstance(node, ast.Name) and not any(node is b for b in bases)}
        meant = {name: module_named(name) for name in self.free - alone}
        self.modules = {name: module for name, module in meant.items() if module}

    def of_code(self) -> set[str]:
        """The names that the code gives where no entry point names one."""
        own = {name for name in self.free - set(self.modules) if not hasattr(builtins, name)}
        if not own:  # `assert sum(10, 15) == 6` is about the code's own `sum`
            own = self.free - set(self.modules)
        return own - set(self.around(own))

    def around(self, own: set[str]) -> Iterator[str]:
        """The functions among `own` that are called with a result of another, and never by themselves."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and _called(node) in own]
        for name in sorted({_called(call) for call in calls}):
            mine = [call for call in calls if _called(call) == name]
            inside = [{_called(node) for node in _within(call) if isinstance(node, ast.Call)} & own for call in mine]
            if all(any(each != name and not each[:1].isupper() for each in names) for names in inside):
                yield name


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def _within(call: ast.Call) -> Iterator[ast.AST]:
    for argument in (*call.args, *call.keywords):
        yield from ast.walk(argument)


def import_modules(modules: Mapping[str, str]) -> dict[str, Any]:
    """Import the modules that tests use without importing them. Raises: ImportError."""
    return {name: importlib.import_module(module) for name, module in modules.items()}


def tests_without_call(source: str) -> Sequence[str]:
    """The functions `test…` without parameters that a source defines and does not call itself."""
    tree = ast.parse(source)
    called = {_called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    return [node.name for node in found if not (node.args.args or node.args.posonlyargs) and node.name not in called]


def asserts(node: ast.AST) -> bool:
    """A node is an assertion: `assert`, `raise`, or a call of an `assert…` as those of `unittest` and `np.testing`."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        else:
            name = _called(node)
        return name.startswith("assert") or name in ("raises", "fail")
    return isinstance(node, ast.Assert | ast.Raise)


def only_defines(source: str) -> bool:
    """A source defines functions and classes, and runs none of them."""
    tree = ast.parse(source)
    runs = [node for node in tree.body if not isinstance(node, (*DEFINITIONS, ast.Assign, ast.AnnAssign, ast.Pass))
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]  # fmt: skip
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    return not runs and not classes and not tests_without_call(source)
