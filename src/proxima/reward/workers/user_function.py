"""Loads and calls a user's function, in a worker or in the run's own process; the graders that return its scores."""

import asyncio
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from proxima.data.errors import suggestion
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.system.user_modules import import_user_module

sources: dict[str, str | None] = {}  # by file or module: its text when the run started; filled only in a worker
_imported: dict[str, dict[str, Any]] = {}  # by folder: the modules that rewards in it have imported from it


def load_user_function(*, path: str, source: str | None = None) -> dict[str, Any]:
    """Load a user's function, so that the loading time is not charged to its first call. `source` is the text of its
    file when the run started: a worker that starts later runs the same text."""
    sources[path.rpartition(":")[0]] = source
    load_function(path)
    return {}


def call_function(path: str, /, *arguments: object, **named: object) -> Any:
    """Call the function; an exception gets a note with the last line of the function's file that it passed."""
    function = load_function(path)
    try:
        with _neighbours(path.rpartition(":")[0]):
            result = function(*arguments, **named)
            if inspect.iscoroutine(result):
                return asyncio.run(result)
            if inspect.isgenerator(result):
                return list(result)
            return result
    except Exception as error:
        file = module_file(sys.modules.get(function.__module__))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if lines:
            error.add_note(f"{Path(str(file)).name}:{lines[-1]}")
        raise


@lru_cache(maxsize=64)
def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `file.py:name`; ValueError says which part of the path is wrong."""
    where, _, name = path.rpartition(":")
    if where.endswith(".py"):
        module = _load_file(Path(where))
    else:
        module = _load_module(where)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"names {where!r}, which has no function {name!r}; {suggestion(name, functions)}")
    return function


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
            code = compile(text or "", str(file), "exec", dont_inherit=True)
            exec(code, vars(module))
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
    source = sources.get(name)
    if source is not None and source != read_source(Path(str(module.__file__))):
        raise ValueError(f"{module.__file__} has changed since the run started; restore it")
    return module


def module_file(module: ModuleType | None) -> str | None:
    """The file of a module; None for one without a file."""
    return getattr(module, "__file__", None)


def read_source(file: Path | None) -> str | None:
    """The text of a Python file; None for anything else."""
    if file is not None and file.suffix == ".py":
        return importlib.util.decode_source(file.read_bytes())
    return None


@contextmanager
def _neighbours(where: str) -> Iterator[None]:
    """While a file is loaded or its function called, let imports find the other files of its folder first, as in a
    script, and not a module that a reward in another folder has imported under the same name. No effect if `where` is a
    module."""
    if not where.endswith(".py"):
        yield
        return
    folder = os.path.dirname(where)
    neighbours = _imported.setdefault(folder, {})
    found_anyway = set(map(os.path.abspath, sys.path))
    for other, modules in _imported.items():
        if other == folder:
            continue
        for name, module in modules.items():
            if sys.modules.get(name) is module and (other not in found_anyway or _has(folder, name)):
                del sys.modules[name]
    sys.modules.update(neighbours)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may itself have removed it
            sys.path.remove(folder)
        new = {name: sys.modules[name] for name in sys.modules.keys() - before if _has(folder, name)}
        files = {name: module_file(module) or f"{folder}{os.sep}" for name, module in new.items()}
        neighbours.update({name: new[name] for name, file in files.items() if file.startswith(f"{folder}{os.sep}")})


def _has(folder: str, module: str) -> bool:
    """Return True if the folder contains the module, or the package that contains it."""
    top = os.path.join(folder, module.partition(".")[0])
    return os.path.isfile(f"{top}.py") or os.path.isdir(top)


def grade_function(
    *,
    path: str,
    values: Mapping[str, Any],
    positional: int = 0,
    prompt: str | None = None,
    completion: str | None = None,
    verl: bool = False,
) -> dict[str, Any]:
    """The return value of the user's function, as a dict with `value`. `values` is keyed by parameter, and its first
    `positional` values are passed by position. `prompt` and `completion` name the parameters that get objects. With
    `verl`, a returned dict has verl's keys."""
    parameters = dict(values)
    if prompt is not None:
        parameters[prompt] = _prompt(parameters[prompt])
    if completion is not None:
        parameters[completion] = Completion(**parameters[completion])
    arguments = [parameters.pop(name) for name in list(parameters)[:positional]]
    try:
        result = call_function(path, *arguments, **parameters)
    except (AttributeError, TypeError) as error:
        if completion is not None and "Completion" in str(error):
            error.add_note(f"{completion} is an object: write {completion}.text, or {completion}: str in the signature")
        raise
    if verl and isinstance(result, Mapping):
        result = _from_verl(result)
    return _as_dict(result)


def _from_verl(result: Mapping[str, Any]) -> dict[str, Any]:
    """`score` as the value, `acc` as `correct` if it is 0 or 1, and the other numbers; a text (`pred`) is dropped."""
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score' (keys: {', '.join(map(str, result)) or 'none'})")
    acc = result.get("acc")
    correct = bool(acc) if acc in (0, 1) else None
    numbers = {key: value for key, value in result.items() if key != "score" and hasattr(value, "__float__")}
    return numbers | {"value": result["score"], "correct": correct}


def grade_function_lists(*, path: str, values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The result of the user's function for `count` completions: for each a dict, its `error`, or None."""
    try:
        result = call_function(path, **values)
    except (AttributeError, TypeError) as error:
        passed = values.get("completions") or values.get("prompts") or [""]
        if isinstance(passed[0], str):
            error.add_note("it got texts; chat: true passes messages")
        else:
            error.add_note("it got messages; chat: false passes texts")
        raise
    scores = _listed(result, f"a list of {count} numbers")
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} completions")
    found = [None if score is None else _score_or_error(score) for score in scores]
    return {"scores": [found]}


def grade_function_batch(*, path: str, groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of the user's function for all groups: per group a list with a dict per completion, or its `error`."""
    typed = tuple(
        Group(
            prompt=_prompt(group["prompt"]),
            completions=tuple(Completion(**fields) for fields in group["completions"]),
            scores=tuple(map(Score.of_facts, group["scores"])),
        )
        for group in groups
    )
    expected = f"{len(typed)} lists with one score for each completion"
    lists = [_listed(scores, expected) for scores in _listed(call_function(path, typed), expected)]
    if [len(scores) for scores in lists] != [len(group.completions) for group in typed]:
        raise ValueError(f"returned {len(lists)} lists with {sum(map(len, lists))} scores, expected {expected}")
    return {"scores": [[_score_or_error(score) for score in scores] for scores in lists]}


def _listed(result: Any, expected: str) -> list[Any]:
    """The items of a list, tuple, array or generator; ValueError for anything else, including a dict, text or set."""
    try:
        if isinstance(result, (str, bytes, Mapping, Set)):
            scores = None
        else:
            scores = iter(result)
    except TypeError:  # including an array without dimensions
        scores = None
    if scores is None:
        raise ValueError(f"returned {_repr(result)}, expected {expected}")
    return list(scores)


def _score_or_error(score: Any) -> dict[str, Any]:
    try:
        return _as_dict(score)
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def _prompt(fields: Mapping[str, Any]) -> Any:
    return Prompt(**{**fields, "messages": tuple(fields["messages"])})


def _as_dict(result: object) -> dict[str, Any]:
    """A number, bool, `Score` or dict as a dict with `value` and floats, so that JSON can hold it."""
    if isinstance(result, Score):
        if not result.valid:
            raise RuntimeError(result.error or "returned an invalid score")
        result = {**result.parts, "value": result.value, "correct": result.correct}
    if not isinstance(result, Mapping):
        verdict = {}
        if isinstance(_scalar(result), bool):
            verdict = {"correct": bool(result)}
        return {"value": to_float(result, "value"), **verdict}
    if "value" not in result:
        raise ValueError(f"returned a dict without 'value' (keys: {', '.join(map(str, result)) or 'none'})")
    numbers = {str(key): to_float(value, str(key)) for key, value in result.items() if key != "correct"}
    return {**numbers, "correct": _to_bool(result.get("correct"))}


def to_float(value: object, key: str) -> float:
    """A returned number as a float; ValueError, with key and value, if it is not a number."""
    try:
        if hasattr(value, "__float__"):  # true of numbers of numpy and torch, not of text
            return float(value)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # too large, or an array of several
        pass
    raise ValueError(f"returned {key}={_repr(value)}, expected a number")


def _to_bool(value: object) -> bool | None:
    scalar = _scalar(value)
    if scalar not in (None, True, False):
        raise ValueError(f"returned correct={_repr(value)}, expected true, false or nothing")
    return None if scalar is None else bool(scalar)


def _scalar(value: Any) -> Any:
    """Convert a number or bool of numpy or torch to Python's own; return anything else unchanged."""
    with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # not such a number, or an array of several
        return value.item()
    return value


def _repr(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"
