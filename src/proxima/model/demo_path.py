"""The path of the demo's model, which `demo_model` downloads."""

from pathlib import Path

DEMO_MODEL = "models/smollm2-135m-instruct"  # relative to the current folder, as the recipes name it


def is_downloadable(path: str) -> bool:
    """True if `path` is that of the demo's model and does not exist yet."""
    return Path(path) == Path(DEMO_MODEL) and not Path(path).exists()
