"""Loads and calls a user's function, in a worker or in the run's own process."""

import asyncio
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from proxima.data.errors import suggestion
from proxima.system.user_modules import import_user_module

sources: dict[str, str | None] = {}  # by file or module: its text when the run started; filled only in a worker
_imported: dict[str, dict[str, Any]] = {}  # by folder: the modules that rewards in it have imported from it


def call_function(path: str, /, *arguments: Any, **named: Any) -> Any:
    """Call the function; an exception gets a note with the last line of the function's file that it passed."""
    function = load_function(path)
    try:
        with _neighbours(path.rpartition(":")[0]):
            result = function(*arguments, **named)
            if inspect.iscoroutine(result):
                return asyncio.run(result)
            return list(result) if inspect.isgenerator(result) else result
    except Exception as error:
        file = getattr(sys.modules.get(function.__module__), "__file__", None)
        if lines := [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]:
            error.add_note(f"{Path(str(file)).name}:{lines[-1]}")
        raise


@lru_cache(maxsize=64)
def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `file.py:name`; ValueError says which part of the path is wrong."""
    where, _, name = path.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"names {where!r}, which has no function {name!r}; {suggestion(name, functions)}")
    return function  # type: ignore[no-any-return]


def _load_file(file: Path) -> Any:
    """The module in a file. A worker uses the text that the file had when the run started, even if it has changed."""
    source = sources.get(str(file))
    if source is None and not file.is_file():
        raise ValueError(f"names a file that does not exist, {str(file)!r}")
    name = f"proxima_reward_{file.stem}_{crc32(bytes(file)):08x}"  # another folder may have a file of that name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    importlib.invalidate_caches()
    try:
        with _neighbours(str(file)):
            text = read_source(file) if source is None else source
            exec(compile(text or "", str(file), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        raise ValueError(f"names {str(file)!r}, which can't be loaded: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> Any:
    """The module of that name; ValueError if its file has changed since the run started."""
    try:
        module = import_user_module(name)
    except ModuleNotFoundError as error:
        message = f"can't be imported: no module {error.name!r} (looking for {name!r}); is its folder on PYTHONPATH?"
        raise ValueError(message) from error
    except Exception as error:
        raise ValueError(f"names module {name!r}, which can't be loaded: {type(error).__name__}: {error}") from error
    if (source := sources.get(name)) is not None and source != read_source(Path(str(module.__file__))):
        raise ValueError(f"{module.__file__} has changed since the run started; restore it")
    return module


def read_source(file: Path | None) -> str | None:
    """The text of a Python file; None for anything else."""
    return importlib.util.decode_source(file.read_bytes()) if file is not None and file.suffix == ".py" else None


@contextmanager
def _neighbours(where: str) -> Iterator[None]:
    """While a file is loaded or its function called, let imports find the other files of its folder first, as in a
    script, and not a module that a reward in another folder has imported under the same name. No effect if `where` is a
    module."""
    if not where.endswith(".py"):
        yield
        return
    folder = os.path.dirname(where)
    own = _imported.setdefault(folder, {})
    found_anyway = set(map(os.path.abspath, sys.path))
    for other, modules in _imported.items():
        for name, module in modules.items() if other != folder else ():
            if sys.modules.get(name) is module and (other not in found_anyway or _has(folder, name)):
                del sys.modules[name]
    sys.modules.update(own)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may itself have removed it
            sys.path.remove(folder)
        new = {name: sys.modules[name] for name in sys.modules.keys() - before if _has(folder, name)}
        files = {name: getattr(module, "__file__", None) or f"{folder}{os.sep}" for name, module in new.items()}
        own.update({name: new[name] for name, file in files.items() if file.startswith(f"{folder}{os.sep}")})


def _has(folder: str, module: str) -> bool:
    """Return True if the folder contains the module, or the package that contains it."""
    top = os.path.join(folder, module.partition(".")[0])
    return os.path.isfile(f"{top}.py") or os.path.isdir(top)
