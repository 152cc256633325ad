"""A run folder as a model: the model of its newest checkpoint."""

from dataclasses import replace
from pathlib import Path

from proxima.config.tree import Node, Source
from proxima.training.checkpoint import checkpoints

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
        return node if entries is None else replace(node, value=[_with_run_model(entry, path[1:]) for entry in entries])
    if path:
        child = (node.mapping or {}).get(path[0])
        if child is None:
            return node
        return replace(node, value={**(node.mapping or {}), path[0]: _with_run_model(child, path[1:])})
    run = Path(node.value).expanduser() if isinstance(node.value, str) else None
    if run is None or not (run / "config.yaml").is_file() or not (run / "metrics.jsonl").is_file():
        return node

    if not (saved := checkpoints(run / "checkpoints")):
        return node  # `models_exist` refuses it
    source = Source(f"{node.source.text}, newest checkpoint of {node.value}", node.source.origin)
    return replace(node, value=str(saved[-1].model), source=source, text=None)
