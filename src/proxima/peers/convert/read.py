"""Read a peer's options by dotted name from YAML, JSON, a launch script or a Python file; nothing is executed."""

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from proxima.config.problems import one_problem
from proxima.config.scalars import Loader
from proxima.peers.convert.read_python import from_python
from proxima.peers.convert.read_script import ROUNDS, Doubtful, Flat, flattened, from_script


def read(path: Path) -> Flat:
    """The options of a file: dotted name → scalar or list, with `${…}` replaced by values of the same file.

    A file that it builds on (`--config FILE` of a script, `defaults` of Hydra) is read first where it is found.

    Raises:
        ConfigError: the file can't be read, or sets no options.
    """
    text = _text(path)
    if path.suffix == ".py":
        return from_python(text, str(path), _usage(text))
    if path.suffix in (".sh", ".bash"):
        return interpolated(_over_base(from_script(text, str(path)), path))
    try:
        raw = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=Loader)  # a safe one
        flat = dict(flattened(raw)) if isinstance(raw, Mapping) else {}
    except json.JSONDecodeError as error:
        raise one_problem(str(path), f"not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise one_problem(str(path), f"not YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, TypeError):
        raise one_problem(str(path), "an anchor contains itself, or a key is no plain word; write it out") from None
    if not isinstance(raw, Mapping) or not flat:
        wanted = "give the framework's own config file, a mapping of option names to values"
        raise one_problem(str(path), f"holds no options; {wanted}")
    return interpolated(_over_defaults(flat, path))


def _usage(text: str) -> Flat:
    """The options of the commands in a Python file's docstring."""
    try:
        return from_script(ast.get_docstring(ast.parse(text)) or "")
    except (SyntaxError, ValueError):
        return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise one_problem(str(path), f"can't be read ({error.strerror}); give a YAML, JSON, .sh or .py file") from None
    except UnicodeDecodeError:
        raise one_problem(str(path), "is not UTF-8 text; give a YAML, JSON, .sh or .py file") from None


# --- files that a file builds on --------------------------------------------------------------------------------------


def _over_base(flat: Flat, path: Path) -> Flat:
    """A script's options over those of its `--config FILE`, searched from the script's folder upwards."""
    written = flat.pop("config", None)
    if written is None:
        return flat
    for folder in (*path.absolute().parents, Path()):
        if (base := folder / str(written)).is_file() and base.absolute() != path.absolute():
            return {**read(base), **flat}
    why = f"the options of {written} come first, and that file is not found from here; convert it where it is"
    return {"config": Doubtful(why), **flat}


def _over_defaults(flat: Flat, path: Path) -> Flat:
    """Hydra's `defaults`: files beside this one are read; the others keep the peer's defaults, and that is a doubt."""
    written = flat.pop("defaults", None)
    if not isinstance(written, list):
        return flat
    base: Flat = {}
    absent = []
    for entry in written:
        beside = path.parent / f"{entry}.yaml"
        if isinstance(entry, str) and entry != "_self_" and beside.is_file() and beside.absolute() != path.absolute():
            base |= read(beside)
        elif entry != "_self_":
            absent.append(str(entry))
    why = f"the options of {', '.join(absent)} come first, and these files are not here; the peer's defaults stand in"
    return {**({"defaults": Doubtful(why)} if absent else {}), **base, **flat}


# --- ${…}, as OmegaConf reads it --------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")  # the innermost one


def interpolated(flat: Flat) -> Flat:
    """Replace `${a.b}`, `${.sibling}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` by values of this file.

    The environment is not read. A reference that the file does not resolve stays as written.
    """
    known = dict(flat)
    for _ in range(ROUNDS):
        pending = [name for name, value in known.items() if isinstance(value, str) and "${" in value]
        changed = False
        for name in pending:
            value = _replaced(known[name], name, known)
            changed |= value != known[name]
            known[name] = value
        if not changed:
            break
    return known


def _replaced(text: str, name: str, known: Flat) -> Any:
    if single := _REFERENCE.fullmatch(text):
        found = _meaning(single[1], name, known)
        return text if found is _UNKNOWN else found

    def one(match: re.Match[str]) -> str:
        found = _meaning(match[1], name, known)
        return match[0] if found is _UNKNOWN else "null" if found is None else str(found)

    return _REFERENCE.sub(one, text)


_UNKNOWN = object()


def _meaning(inside: str, name: str, known: Flat) -> Any:
    resolver, colon, rest = inside.partition(":")
    if not colon:
        return known.get(_absolute(inside, name), _UNKNOWN)
    target, comma, default = rest.partition(",")
    if resolver == "oc.select" and (found := known.get(_absolute(target, name))) is not None:
        return found
    if resolver in ("oc.select", "oc.env") and comma:
        return yaml.load(default, Loader=Loader)
    return None if resolver == "oc.select" else _UNKNOWN


def _absolute(target: str, name: str) -> str:
    target = target.strip()
    dots = len(target) - len(target.lstrip("."))
    return ".".join([*name.split(".")[:-dots], target[dots:]]) if dots else target
