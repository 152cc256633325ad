"""Read a peer's options by dotted name from YAML, JSON, TOML, a launch script or a Python file; nothing is executed."""

import ast
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from proxima.config.problems import ConfigError, one_problem
from proxima.config.scalars import Loader
from proxima.data.json_reader import load_json
from proxima.system.user_files import read_text
from proxima_peers.convert.read_python import from_python
from proxima_peers.convert.read_script import ROUNDS, Doubtful, Flat, flattened, from_script, variables_of_command

SCRIPTS = (".sh", ".bash")
# The largest file of the peers' own has 50 kB and 950 options.
LARGEST = 10**6  # bytes
MOST = 5000  # options


def read(path: Path) -> Flat:
    """The options of a file: dotted name → scalar or list, with `${…}` replaced by values of the same file.

    A file on which it builds (`--config FILE` of a script, `defaults` of Hydra) is read first if it is found; what the
    script gives its command as environment variables counts in `${oc.env:…}` of that file.

    Raises:
        ConfigError: the file can't be read, or sets no options.
    """
    options = _composed(path)
    if path.suffix not in SCRIPTS:
        return interpolated(options)
    return interpolated(options, variables_of_command(_text(path)))


def _composed(path: Path, choices: Mapping[str, str] = MappingProxyType({}), above: tuple[Path, ...] = ()) -> Flat:
    """As `read`, with `${…}` as written: references can be resolved only when all files have been merged.

    Args:
        choices: group → its file, as overridden in the `defaults` of a file that builds on this one.
        above: the files that build on this one.
    """
    text = _text(path)
    if path.suffix == ".py":
        return _with_launcher(from_python(text, str(path), _usage(text)), path)
    if path.suffix in SCRIPTS:
        return _over_base(_with_launcher(from_script(text, str(path)), path), path)
    try:
        if path.suffix == ".toml":
            raw: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            raw = _json(text, path)
        else:
            raw = yaml.load(text, _Once)
        flat: Flat = {}
        if isinstance(raw, Mapping):
            flat = dict(itertools.islice(flattened(raw), MOST))
    except ConfigError:
        raise
    except tomllib.TOMLDecodeError as error:
        raise one_problem(str(path), f"not TOML: {error}") from None
    except yaml.YAMLError as error:
        raise one_problem(str(path), f"not YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, TypeError, ValueError):
        raise one_problem(str(path), "an anchor contains itself, or a key is not a plain word; write it out") from None
    if isinstance(raw, Mapping) and {"model", "task"} <= raw.keys():
        raise one_problem(str(path), "is a recipe of proxima; proxima explain shows it")
    wanted = "give the framework's own config file, a mapping of option names to values"
    if not flat:
        raise one_problem(str(path), f"holds no options; {wanted}")
    if len(flat) == MOST:
        raise one_problem(str(path), f"holds too many options; {wanted}")
    return _over_defaults(flat, path, choices, above)


def _json(text: str, path: Path) -> Any:
    try:
        return load_json(text, object_pairs_hook=_merged)
    except ValueError as error:
        raise one_problem(str(path), f"not JSON: {error}") from None


_COMMAND = re.compile(r"\s*(?:[A-Z_]+=\S+\s+)*(?:python3?|accelerate|torchrun|trl|deepspeed|uv)\s")


def _usage(text: str) -> Flat:
    """The options of the commands in a Python file's docstring."""
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
        lines = re.sub(r"\\\n", " ", docstring).splitlines()
        return from_script("\n".join(line for line in lines if _COMMAND.match(line)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _text(path: Path) -> str:
    wanted = "give a YAML, JSON, TOML, .sh or .py file"
    try:
        if path.stat().st_size > LARGEST:
            raise one_problem(str(path), f"is larger than {LARGEST // 10**6} MB, as no configuration is; {wanted}")
        return read_text(path, "utf-8-sig")
    except OSError as error:
        raise one_problem(str(path), f"can't be read ({error.strerror}); {wanted}") from None
    except UnicodeDecodeError:
        raise one_problem(str(path), f"is not UTF-8 text; {wanted}") from None


# --- a key that is written twice --------------------------------------------------------------------------------------


class _Once(Loader):
    """Keeps the first value of a repeated key, which YAML would drop, and merges both as `_merged` does."""


def _mapping(loader: Loader, node: yaml.MappingNode) -> Iterator[dict[Any, Any]]:
    pairs: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            name = key.value
        else:
            name = key
        if name in pairs:
            value = _joined(pairs[name][1], value)
        pairs[name] = (key, value)
    mapping: dict[Any, Any] = {}
    yield mapping
    mapping |= loader.construct_mapping(yaml.MappingNode(node.tag, list(pairs.values()), *_marks(node)))


def _joined(first: yaml.Node, second: yaml.Node) -> yaml.Node:
    if isinstance(first, yaml.MappingNode) and isinstance(second, yaml.MappingNode):
        return yaml.MappingNode(first.tag, first.value + second.value, *_marks(first))
    texts = [yaml.serialize(node).strip().removesuffix("...").strip() for node in (first, second)]
    if texts[0] == texts[1]:
        return second
    return yaml.ScalarNode("!both", " and ".join(texts), *_marks(second))


def _marks(node: yaml.Node) -> tuple[Any, Any]:
    return node.start_mark, node.end_mark


def _both(loader: Loader, node: yaml.ScalarNode) -> Doubtful:
    return Doubtful(f"the file has both {loader.construct_scalar(node)}")


_Once.add_constructor("!both", _both)
_Once.add_constructor("tag:yaml.org,2002:map", _mapping)


def _merged(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The mapping; sections with the same name are merged, and a name with two values is `Doubtful`."""
    merged: dict[Any, Any] = {}
    for name, value in pairs:
        before = merged.get(name, value)
        if isinstance(before, dict) and isinstance(value, dict) and name in merged:
            merged[name] = _merged([*before.items(), *value.items()])
        elif before == value:
            merged[name] = value
        else:
            merged[name] = Doubtful(f"the file has both {before} and {value}")
    return merged


# --- files on which a file builds -------------------------------------------------------------------------------------


# What a script's program reads first, from the folder of the script or one above it.
OWN_CONFIGS = {
    "recipe.cppo.src.main_cppo": "src/config/cppo_trainer.yaml",
    "recipe.dapo.main_dapo": "config/dapo_trainer.yaml",
}


def _over_base(flat: Flat, path: Path) -> Flat:
    """A script's options merged over those of its `--config FILE` or its program's own, searched from the script's
    folder upwards."""
    own = _own_config(flat.get("launch"), path)
    if own is not None:
        return _composed(own) | _without(flat, "launch")
    flat = _over_sections(flat, path)
    written = flat.get("config", flat.get("config_name"))
    if written is None:
        return flat
    name = "config" if "config" in flat else "config_name"
    folder = flat.get("config_path")
    relative = Path(str(written))
    if isinstance(folder, str):
        relative = Path(folder) / relative
    base = _found(relative, path)
    if base is not None:
        return _composed(base) | _without(flat, name, "config_path")
    if name == "config_name" and _is_of_unirl(path):
        raise _not_found_of_unirl(path, str(written))
    if name == "config_name" and folder is None:  # of the peer's own package: its defaults
        return flat
    return flat | {"config": _not_found(written)}


def _own_config(launch: Any, path: Path) -> Path | None:
    """The config that the launched program reads first, if it has one and it is found."""
    if not isinstance(launch, Doubtful):
        return None
    program, says, _ = launch.why.partition(" may have its own defaults,")
    if not says or program not in OWN_CONFIGS:
        return None
    return _found(Path(OWN_CONFIGS[program]), path)


def _without(flat: Flat, *names: str) -> Flat:
    """The other options."""
    return {key: value for key, value in flat.items() if key not in names}


def _not_found(file: Any) -> Doubtful:
    return Doubtful(f"the options of {file} come first, and that file is not found from here; convert it where it is")


RECIPES = {  # the configs of UniRL that are recipes here
    "qwen3_cppo_30b_a3b_base_dapo_sglang": "qwen3_30b_cppo",
    "qwen3_dppo_4b_base_dapo_sglang": "qwen3_4b_dppo",
    "qwen3_drpo_4b_base_dapo_sglang": "qwen3_4b_drpo",
    "qwen3_grpo_4b_base_dapo_sglang": "qwen3_4b_grpo",
}


def _not_found_of_unirl(path: Path, written: str) -> ConfigError:
    """The problem of a script that names a config of UniRL, whose file is not found."""
    ours = RECIPES.get(Path(written).stem)
    remedy = "convert its YAML file; it is in UniRL/examples"
    if ours:
        remedy = f"convert its YAML file; the recipe of it here is {ours}"
    return one_problem(str(path), f"runs UniRL with the config {written}, which is not found from here; {remedy}")


def _is_of_unirl(path: Path) -> bool:
    """Return True for a script that runs UniRL, or its launch script."""
    return re.search(r"\bunirl\.train_|run_experiment\w*\.sh", _text(path)) is not None


def _over_sections(flat: Flat, path: Path) -> Flat:
    """prime-rl's `--trainer @ FILE`: the options of the file, within that section, below those of the command."""
    for name in [name for name in flat if name.endswith(".config") and name.count(".") == 1]:
        section = name.removesuffix(".config")
        file = str(flat[name])
        base = _found(Path(file), path)
        if base is not None:
            below = {f"{section}.{option}": value for option, value in _composed(base).items()}
            flat = below | _without(flat, name)
        else:
            flat = flat | {name: _not_found(file)}
    return flat


def _with_launcher(flat: Flat, path: Path) -> Flat:
    """A command's options, with those from accelerate's `--config_file FILE`, if found, that affect numbers."""
    written = flat.get("config_file")
    if not written:
        return flat
    file = _found(Path(str(written)), path)
    if file is None:
        return flat
    launcher = _composed(file)
    settings: Flat = {name: launcher[name] for name in ("num_processes", "mixed_precision") if name in launcher}
    return settings | _without(flat, "config_file")


def _found(relative: Path, path: Path) -> Path | None:
    """A YAML or JSON file that the file at `path` names, searched from its folder upwards."""
    for folder in (*path.absolute().parents, Path()):
        for file in (folder / relative, folder / f"{relative}.yaml", folder / f"examples/{relative}.yaml"):
            if file.suffix not in (*SCRIPTS, ".py") and file.is_file():
                return file
    return None


def _over_defaults(flat: Flat, path: Path, choices: Mapping[str, str], above: tuple[Path, ...]) -> Flat:
    """Hydra's `defaults`: files in this folder are read; for others, the peer's defaults apply, with a doubt."""
    written = flat.pop("defaults", None)
    if not isinstance(written, list):
        return flat
    entries = [(group, package, choices.get(group, name)) for group, package, name in _entries(written)]
    chosen = {group.removeprefix(OVERRIDE): name for group, _, name in entries if group} | dict(choices)
    if "_self_" not in written:
        entries.append(("", None, "_self_"))
    base: Flat = {}
    absent = []
    for group, package, name in entries:
        relative = re.sub(r"\$\{(\w+)\}", lambda match: chosen.get(match[1], match[0]), f"{group}/{name}".lstrip("/"))
        beside = path.parent / f"{relative.removesuffix('.yaml')}.yaml"
        if name == "_self_":
            base |= flat
        elif group.startswith(OVERRIDE):
            continue
        elif not beside.is_file() or beside.resolve() in (path.resolve(), *above):
            absent.append(relative)
        else:
            prefix = _package(beside, package, group)
            options = _composed(beside, chosen, (*above, path.resolve()))
            base |= {f"{prefix}{option}": value for option, value in options.items()}
    nested = base.pop("defaults", None)
    if isinstance(nested, Doubtful):
        absent.append(nested.why)
    if not absent:
        return base
    why = f"the options of {', '.join(absent)} come first, and these files are missing; the peer's defaults are used"
    return {"defaults": Doubtful(why)} | base


OVERRIDE = "override "


def _package(file: Path, package: str | None, group: str) -> str:
    """The section that a file's options go into, with its dot: the entry's `@package`, else the file's own header, else
    the folder."""
    header = re.search(r"^# *@package +(\S+)", _text(file), re.MULTILINE)
    if package is not None:
        home = package
    elif header:
        home = header[1]
    else:
        home = group.replace("/", ".").strip(".")
    if home in ("", "_global_"):
        return ""
    return f"{home}."


def _entries(written: list[Any]) -> Iterator[tuple[str, str | None, str]]:
    """(group, package, name) of each entry: `ppo_trainer`, `actor@actor_rollout_ref.actor: dp_actor`."""
    for entry in written:
        if not isinstance(entry, Mapping):
            entry = {"": entry}
        for key, value in entry.items():
            group, at, package = str(key).removeprefix("optional ").partition("@")
            target = package if at else None
            for name in _as_list(value):
                yield group, target, str(name)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


# --- ${…}, as OmegaConf reads it --------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")  # the innermost one


def interpolated(flat: Flat, environment: Mapping[str, Any] = MappingProxyType({})) -> Flat:
    """Replace `${a.b}`, `${.sibling}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}` and `${oc.decode:text}` by
    values of this file.

    A reference that can't be resolved within the file stays as written.

    Args:
        environment: the variables that a script gives its command; those of this process are not read.
    """
    options = dict(flat)
    for _ in range(ROUNDS):
        pending = [name for name, value in options.items() if isinstance(value, str) and "${" in value]
        changed = False
        for name in pending:
            value = _replaced(options[name], name, options, environment)
            changed |= value != options[name]
            options[name] = value
        if not changed:
            break
    return options


def _replaced(text: str, name: str, options: Flat, environment: Mapping[str, Any]) -> Any:
    def meaning(inside: str) -> Any:
        return _meaning(inside, name, options, environment)

    single = _REFERENCE.fullmatch(text)
    if single:
        value = meaning(single[1])
        return text if value is _UNKNOWN else value
    for inside in _REFERENCE.findall(text):
        value = meaning(inside)
        if isinstance(value, Doubtful):
            return value

    def replacement(match: re.Match[str]) -> str:
        value = meaning(match[1])
        if value is _UNKNOWN:
            return match[0]
        if value is None:
            return "null"
        return str(value)

    return _REFERENCE.sub(replacement, text)


_UNKNOWN = object()


def _meaning(inside: str, name: str, options: Flat, environment: Mapping[str, Any]) -> Any:
    resolver, colon, rest = inside.partition(":")
    if not colon:
        return options.get(_absolute(inside, name), _UNKNOWN)
    target, comma, default = rest.partition(",")
    if resolver == "oc.env" and target.strip() in environment:
        return environment[target.strip()]
    if resolver == "oc.decode":
        return yaml.load(rest, Loader=Loader)
    if resolver == "oc.select":
        value = options.get(_absolute(target, name))
        if value is not None or not comma:
            return value
    if resolver in ("oc.select", "oc.env") and comma:
        return yaml.load(default, Loader=Loader)
    return _UNKNOWN


def _absolute(target: str, name: str) -> str:
    target = target.strip()
    dots = len(target) - len(target.lstrip("."))
    if dots:
        return ".".join([*name.split(".")[:-dots], target[dots:]])
    return target
