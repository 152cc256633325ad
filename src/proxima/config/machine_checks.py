"""Checks of a config against this machine: model folder, data files, device, dtypes. Nothing is loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.config.describe import kind_of
from proxima.config.problems import Problem, nearest
from proxima.config.recipe_reader import shown_path
from proxima.config.resolve import Resolved
from proxima.config.tree import FILL_IN
from proxima.data import FieldError
from proxima.model.adapter_files import base_of, check_start
from proxima.model.demo_model import is_downloadable, missing_reader
from proxima.model.files import ADAPTER_CONFIG as ADAPTER
from proxima.model.hub_names import looks_like_hub_name, near_folder, two_readings
from proxima.model.load import check_device, check_path, export_remedy, is_run, load_shape, load_tokenizer
from proxima.model.lora import Lora, missing_peft, target_layers
from proxima.reward import ModelReward
from proxima.task.prepared import PreparedTask, prepare_command

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")


def model_exists(r: Resolved[Any]) -> Iterator[Problem]:
    """A local path exists and is a model folder or a .gguf file."""
    if remedy := model_problem(r.config.model.path):
        yield r.problem("model.path", remedy)


def adapters_are_ready(r: Resolved[Any]) -> Iterator[Problem]:
    """The package for adapters is installed, the targets are layers of the model, and the adapter to start from was
    made for it."""
    lora, model = r.config.model.lora, r.config.model
    if lora is None:
        return
    if (remedy := missing_peft()) is not None:
        yield r.problem("model.lora", f"needs the package peft: {remedy}")
    elif (Path(model.path) / ADAPTER).is_file():
        yield r.problem("model.path", "is an adapter; write its base there, and the adapter as model.lora.path")
    elif lora.path is not None and lora.init != Lora.init:
        yield r.problem("model.lora.init", "draws a new adapter, and model.lora.path is one; set one of the two")
    else:
        try:
            if lora.path is not None:
                check_start(lora, model.path, model.revision, scalar=hasattr(r.config, "reward_model"))
            if (Path(model.path) / "config.json").is_file():  # not a name of the hub, which would be asked
                target_layers(load_shape(model.path), lora)
        except FieldError as error:
            if error.field.startswith("model.lora"):
                yield r.problem(error.field, error.requirement)


def reward_head_is_new(r: Resolved[Any]) -> Iterator[Problem]:
    """A reward model that is trained further keeps its head."""
    path, section = r.config.model.path, r.config.reward_model
    if section.head_std != type(section).head_std and has_score(path):
        message = f"is for a new head, and {path} has one, which is trained further; leave it out"
        yield r.problem("reward_model.head_std", message)


def has_score(path: str) -> bool:
    """Whether a local folder is that of a scalar model; False for a name of the hub, which is not asked."""
    try:
        known = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return any("SequenceClassification" in name for name in known.get("architectures") or ())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def reward_models_are_ready(r: Resolved[Any]) -> Iterator[Problem]:
    """A reward model has a scalar head, and reads the policy's tokens only if it has its vocabulary."""
    lists = {"reward": r.config.reward}
    lists |= {f"{path}.reward": one.reward for path, one in (r.get("eval.all_sets") or {}).items() if one.reward}
    for path, rewards in lists.items():
        for i, reward in enumerate(rewards):
            if isinstance(reward, ModelReward):
                try:
                    reward.check()
                    if model_problem(r.config.model.path) is None:
                        reward.check_vocabulary(load_tokenizer(r.config.model.path, r.config.model.revision))
                except FieldError as error:
                    yield r.problem(f"{path}.{i}.{error.field}", error.requirement)


def trackers_are_ready(r: Resolved[Any]) -> Iterator[Problem]:
    """The packages of the trackers are installed, and no tool is named twice."""
    kinds = [kind_of(tracker) for tracker in r.config.monitor]
    for index, tracker in enumerate(r.config.monitor):
        if remedy := tracker.problem():
            yield r.problem(f"monitor.{index}.kind", remedy)
        elif kinds[index] in kinds[:index]:
            yield r.problem(f"monitor.{index}.kind", "is named twice; keep one")


def model_problem(path: str) -> str | None:
    """Why `path` is not a model, with the remedy; None if it may be one."""
    place = Path(path)
    if is_downloadable(path):
        return missing_reader()
    if (place / ADAPTER).is_file():
        try:
            check_path(path)
        except FieldError as error:
            return error.requirement
        return missing_peft()
    if is_run(place):
        return f"is a run, not its model; {export_remedy(path)}"
    if place.is_dir():
        there = (place / "config.json").is_file()
        return None if there else "is a folder without config.json; give a Hugging Face model folder or a .gguf file"
    if place.is_file():
        remedy = "is a file but not .gguf; give the folder that holds config.json, or a .gguf file"
        return None if place.suffix == ".gguf" else remedy
    if place.exists():
        return "is no file and no folder but a device, a pipe or a socket; give a folder or a .gguf file"
    if looks_like_hub_name(path):
        return None
    where = "" if place.is_absolute() or path.startswith("~") else ": a path is relative to the current folder"
    remedy = f"{_near(place) or near_folder(path)}give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B"
    return f"does not exist{where}; {remedy}{two_readings(path)}"


def _near(place: Path) -> str:
    near = nearest(place.name, (child.name for child in place.parent.glob("*")))
    return f"did you mean {shown_path(place.parent / near)}? Else " if near else ""


def completions_fit_context(r: Resolved[Any]) -> Iterator[Problem]:
    """`max_tokens` leaves room for a prompt in the context."""
    limit, name = r.config.model.max_length, "model.max_length"
    path = r.config.model.path
    found = Path(base_of(path).path if (Path(path) / ADAPTER).is_file() else path) / "config.json"
    if limit is None and found.is_file():
        limit, name = _context_of(found), f"max_position_embeddings in {shown_path(found)}"
    if limit is None:
        return
    for path, sampling in ((path, r.get(path)) for path in ("sampling", "eval.sampling")):
        if sampling is not None and sampling.max_tokens >= limit:
            message = f"leaves no room for a prompt: the context is {limit} tokens ({name}); lower it"
            yield r.problem(f"{path}.max_tokens", message)


def _context_of(file: Path) -> int | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def data_files_exist(r: Resolved[Any]) -> Iterator[Problem]:
    """A task that names a data file, or prepared data, names some that exist."""
    held_out = r.get("eval.all_sets") or {}
    tasks = {f"{path}.task": one.task for path, one in held_out.items()}
    if not r.get("rollouts"):  # a replay reads no training questions
        tasks = {"task": r.get("task"), **tasks}
    for slot, task in tasks.items():
        if isinstance(task, PreparedTask) and (missing := task.missing()):
            yield r.problem(f"{slot}.path", missing)
        for name, value in vars(task).items() if task is not None else ():
            if isinstance(value, str) and value.endswith(DATA_SUFFIXES) and "://" not in value and "*" not in value:
                place = Path(value).expanduser()
                if not place.is_file():
                    made = prepare_command(place)
                    remedy = f"make it: {made}" if made else f"{_near(place)}give a path relative to the current folder"
                    yield r.problem(f"{slot}.{name}", f"no such file; {remedy}")


def values_are_filled_in(r: Resolved[Any]) -> Iterator[Problem]:
    """No value has the comment that it only stands in for one to be filled in."""
    for entry in r.entries:
        if entry.where.endswith(FILL_IN):
            remedy = f"set it and remove the comment, or {entry.path}=… on the command line"
            yield r.problem(entry.path, f"stands in for a value that is still to fill in; {remedy}")


def dtypes_are_consistent(r: Resolved[Any]) -> Iterator[Problem]:
    """Autocast never raises the precision of products: weights in bfloat16 have products in bfloat16."""
    if r.config.model.compute_dtype == "float32" and r.config.model.dtype == "bfloat16":
        message = "has no effect: weights in bfloat16 (model.dtype) have products in bfloat16; set both to one dtype"
        yield r.problem("model.compute_dtype", message)


def device_exists(r: Resolved[Any]) -> Iterator[Problem]:
    """The device is of a known kind and exists here."""
    try:
        check_device(r.config.model.device, "model.device")
    except FieldError as error:
        yield r.problem("model.device", error.requirement)
