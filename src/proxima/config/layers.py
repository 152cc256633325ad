"""Merge layers into one tree: preset ← extended recipe ← recipe ← command line, with presets written out."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from proxima.config.describe import NO_FIELD, FieldInfo, class_at, fields_of, kinds_of, root_field, table_of
from proxima.config.families import Family
from proxima.config.recipe_reader import read_overrides, read_recipe
from proxima.config.tree import COMMAND_LINE, DEFAULT, Node, Source, merge, node_of
from proxima.data.kinds import Slot
from proxima.system.user_files import FILE
from proxima.training.checkpoint import checkpoints


def merged(layers: Sequence[Node], overrides: Sequence[str], root: type) -> Node:
    """Merge the layers, lowest first, and then the overrides over the presets that they name.

    An override `@FILE` lays a recipe file over the others, such as `@layouts/qwen3_30b_128xH800` for a cluster; every
    `key=value` takes precedence over all files. `root` is the config of the recipe's family. Presets are
    written out after each layer, so that the next one sees which kinds it changes. Raises ConfigError for a malformed
    override, or an index beyond the end of its list.
    """
    config = root_field(root)
    tree = Node({}, layers[-1].source)
    over = list[Node]()
    for text in overrides:
        if text.startswith(FILE):
            over += read_recipe(text.removeprefix(FILE))
    values = [text for text in overrides if not text.startswith(FILE)]
    for layer in [*layers, *over, read_overrides(values, config)]:
        tree = _with_section_presets(merge(tree, _with_list_presets(layer, root), config), root)
    return tree


def _with_section_presets(tree: Node, root: type) -> Node:
    """Lay each section that names a preset over the preset's fields; `Builder` refuses an unknown one."""
    fields = dict(tree.mapping or {})
    for info in fields_of(root):
        node = fields.get(info.name)
        if info.presets is None or node is None or node.at("preset") is None:
            continue
        chosen = (node.mapping or {})["preset"]
        presets = table_of(info.presets)
        if isinstance(chosen.value, str) and chosen.value in presets:
            below = _written_out(presets[chosen.value], chosen)
            fields[info.name] = merge(below, node, info, info.name)
    return replace(tree, value=fields)


def _with_list_presets(layer: Node, cls: type) -> Node:
    """Replace each name of a list preset in the layer by its specs."""
    if layer.mapping is None:
        return layer
    fields = dict(layer.mapping)
    for info in fields_of(cls):
        node = fields.get(info.name)
        if node is None:
            continue
        if info.slot is not None and info.slot.presets:
            fields[info.name] = _expanded(node, info.slot, table_of(info.slot.presets))
        elif info.section is not None:
            fields[info.name] = _with_list_presets(node, info.section)
    return replace(layer, value=fields)


def _expanded(node: Node, slot: Slot, presets: Mapping[str, Sequence[Any]]) -> Node:
    if node.items is not None:
        children = list[Node]()
        for child in node.items:
            part = _expanded(child, slot, presets)
            if part.items is None:
                children.append(part)
            else:
                children += part.items
        return replace(node, value=children)
    name = node
    if node.mapping and node.mapping.keys() == {"kind"}:
        name = node.mapping["kind"]
    if not isinstance(name.value, str) or name.value not in presets:
        return node
    kinds = kinds_of(slot)
    specs = [{"kind": kinds.kind_of(spec), **asdict(spec)} for spec in presets[name.value]]
    return _written_out(specs, name)


def _written_out(preset: Mapping[str, Any] | Sequence[Any], chosen: Node) -> Node:
    """The preset, fields of a section or specs of a list, as a tree; every `kind` also says where it was chosen."""
    short = f"preset {chosen.value}"
    chosen_in = Source(f"{short}, chosen in {chosen.source.text}", "preset")
    return node_of(preset, Source(short, "preset"), chosen_in)


def with_evaluation_defaults(sections: Mapping[str, Node], training: Node | None, root: type) -> dict[str, Node]:
    """Lay `eval.sampling`, and that of each of `eval.sets`, over the training's sampling. Without `eval.task` nothing
    changes, except that the recipe's `eval.every` becomes 0 if the command line removes the task.

    Args:
        sections: those that the command reads.
        training: the recipe's `sampling`, whether or not it is among them.
        root: the config of the command.
    """
    fields = dict(sections)
    evaluation = fields.get("eval")
    if evaluation is None or evaluation.mapping is None:
        return fields
    task = evaluation.mapping.get("task")
    every = evaluation.mapping.get("every")
    if task is None or task.value is None:
        removed = task is not None and task.source == COMMAND_LINE
        if removed and every is not None and every.source.origin == "file":
            none = Node(0, Source("command line, eval.task=null", "command line"), "0", over=every)
            fields["eval"] = replace(evaluation, value={**evaluation.mapping, "every": none})
        return fields
    below = root_field(root).child("eval").child("sampling")
    if below is NO_FIELD:
        return fields
    sets = evaluation.mapping.get("sets")
    if sets is not None and sets.items is not None:
        each = [_with_sampling(held_out, training, below) for held_out in sets.items]
        evaluation = replace(evaluation, value={**evaluation.mapping, "sets": replace(sets, value=each)})
    return fields | {"eval": _with_sampling(evaluation, training, below)}


def with_held_out_part(
    sections: Mapping[str, Node], task: Node | None, family: type, root: type, *, import_code: bool
) -> dict[str, Node]:
    """Where `eval.task` is left out, set it to the part that the training's task holds out. A null that is written
    stays: then nothing is evaluated.

    Args:
        sections: those that the command reads.
        task: the recipe's `task`, whether or not it is among them.
        family, root: the configs of the recipe's family and of the command; nothing changes if their sections `eval`
            differ.
        import_code: see `Builder`.
    """
    fields = dict(sections)
    theirs, ours = (root_field(cls).child("eval").section for cls in (family, root))
    evaluation = fields.get("eval", Node({}, DEFAULT))
    if task is None or ours is not theirs or evaluation.mapping is None or "task" in evaluation.mapping:
        return fields

    slot = root_field(family).child("task").slot
    if slot is None or not _holds_out(task, slot, import_code):
        return fields

    part = Node("held_out", Source("default, the task has a held-out part", "default"), "held_out")
    held_out = _derived(task, "task")
    held_out = replace(held_out, value={**(held_out.mapping or {}), "part": part})
    return fields | {"eval": replace(evaluation, value={**evaluation.mapping, "task": held_out})}


def _holds_out(task: Node, slot: Slot, import_code: bool) -> bool:
    """True if a task, or one of the tasks that its kind combines, sets the share of its rows that is held out."""
    cls = _class_of(task, slot, import_code)
    fields = {} if cls is None else {info.name: info for info in fields_of(cls)}
    if "part" not in fields:
        return False
    if "held_out" in fields and task.at("held_out") is not None:
        return True

    for info in fields.values():
        node = (task.mapping or {}).get(info.name)
        if node is None or info.slot is None:
            continue
        for source in node.items or ():
            inner = root_field(_class_of(source, info.slot, import_code) or object).child("task").slot
            below = (source.mapping or {}).get("task")
            if inner is not None and below is not None and _holds_out(below, inner, import_code):
                return True
    return False


def _class_of(node: Node, slot: Slot, import_code: bool) -> type | None:
    """The class of a spec's kind; None if it can't be looked up, which `Builder` reports."""
    kind = node.at("kind") or slot.default
    kinds = kinds_of(slot)
    if kind in kinds:
        return kinds[str(kind)]
    if not isinstance(kind, str) or ":" not in kind or not import_code:
        return None
    with suppress(Exception):  # importing runs arbitrary code
        cls = class_at(kind)
        return cls if is_dataclass(cls) else None
    return None


def _derived(node: Node, path: str) -> Node:
    """The node as the default of another field: each value says from where."""
    source = Source(f"as {path}", "default")
    if node.mapping is not None:
        return Node({key: _derived(child, f"{path}.{key}") for key, child in node.mapping.items()}, source)
    if node.items is not None:
        return Node([_derived(child, f"{path}.{number}") for number, child in enumerate(node.items)], source)
    return replace(node, source=source, over=None)


def _with_sampling(evaluation: Node, training: Node | None, info: FieldInfo) -> Node:
    """Lay the sampling of a held-out set over its defaults: with several samples per question all of the training's
    sampling, else its `max_tokens` and `stop`, and greedy."""
    if evaluation.mapping is None:
        return evaluation
    samples = evaluation.at("samples")
    several = isinstance(samples, int) and samples > 1
    below = dict[str, Node]()
    keys = ["max_tokens", "stop"]
    if several:
        keys = ["temperature", "top_k", "top_p", "min_p", *keys]
    else:
        below["temperature"] = Node(0.0, Source("default, evaluation is greedy", "default"), "0")
    for key in keys:
        if training and training.mapping and key in training.mapping:
            below[key] = replace(training.mapping[key], source=Source(f"as sampling.{key}", "default"), over=None)
    sampling = Node(below, DEFAULT)
    written = evaluation.mapping.get("sampling")
    if written is not None and written.value is not None:
        sampling = merge(sampling, written, info)
    return replace(evaluation, value={**evaluation.mapping, "sampling": sampling})


def with_learning_rate(tree: Node, family: Family) -> Node:
    """Set the family's default learning rate, if it has one, the optimizer is one of proxima's, and the recipe sets no
    rate."""
    rate = family.learning_rate
    train = (tree.mapping or {}).get("train", Node({}, DEFAULT))
    if rate is None or train.mapping is None:
        return tree
    optimizer = train.mapping.get("optimizer", Node({}, DEFAULT))
    kinds = (None, *table_of("proxima.training:OPTIMIZERS"))
    if optimizer.mapping is None or "lr" in optimizer.mapping or optimizer.at("kind") not in kinds:
        return tree
    source = Source(f"default of {family.name} recipes", "default")
    return merge(tree, node_of({"train": {"optimizer": {"lr": rate}}}, source))


MODELS = (
    ("model", "path"),
    ("model", "lora", "path"),
    ("critic", "path"),
    ("algorithm", "distillation", "path"),
    ("reward", "*", "path"),  # * is each entry of a list
    ("eval", "sets", "*", "reward", "*", "path"),
)


def with_run_models(tree: Node) -> Node:
    """Replace a run folder that a recipe names as a model by the folder of its newest checkpoint's model, with or
    without an adapter. The run that is started records this folder, so that it resumes from the same weights. A run
    without a checkpoint is left as it is.
    """
    for path in MODELS:
        tree = _with_run_model(tree, path)
    return tree


def _with_run_model(node: Node, path: tuple[str, ...]) -> Node:
    if path[:1] == ("*",):
        entries = node.items
        if entries is None:
            return node
        return replace(node, value=[_with_run_model(entry, path[1:]) for entry in entries])
    if path:
        first, *rest = path
        if node.mapping is None or first not in node.mapping:
            return node
        child = _with_run_model(node.mapping[first], tuple(rest))
        return replace(node, value={**node.mapping, first: child})
    run = None
    if isinstance(node.value, str):
        run = Path(node.value).expanduser()
    if run is None or not (run / "config.yaml").is_file() or not (run / "metrics.jsonl").is_file():
        return node

    saved = checkpoints(run / "checkpoints")
    if not saved:
        return node  # `models_exist` refuses it
    source = Source(f"{node.source.text}, newest checkpoint of {node.value}", node.source.origin)
    return replace(node, value=str(saved[-1].model), source=source, text=None)


def with_sources_own_rewards(fields: Mapping[str, Node]) -> dict[str, Node]:
    """The fields of a recipe with an empty `reward`, if it names none and every source of its tasks has its own."""
    written = fields.get("reward")
    if written is not None and written.value not in (None, []):
        return dict(fields)
    evaluated = fields.get("eval")
    evaluation = (evaluated.mapping or {}) if evaluated else {}
    tasks = [fields.get("task"), evaluation.get("task")]
    needing = [task for task in tasks if task is not None and task.value is not None]
    sets = evaluation.get("sets")
    held_out = (sets.items or []) if sets else []
    for each in held_out:
        task = (each.mapping or {}).get("task")
        if task is not None and not each.at("reward"):
            needing.append(task)
    if not needing or not all(_sources_have_rewards(task) for task in needing):
        return dict(fields)
    return {**fields, "reward": Node([], DEFAULT)}


def _sources_have_rewards(task: Node) -> bool:
    """True for a mix whose sources all have rewards of their own, also as mixes."""
    sources = (task.mapping or {}).get("tasks")
    if task.at("kind") != "mix" or sources is None or not sources.items:
        return False
    inner = [(source, (source.mapping or {}).get("task")) for source in sources.items]
    return all(source.at("reward") or (task is not None and _sources_have_rewards(task)) for source, task in inner)
