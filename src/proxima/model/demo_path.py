"""Where the model of the demo is, which `demo_model` downloads."""

from pathlib import Path

DEMO_MODEL = "models/smollm2-135m-instruct"  # relative to the current folder, as the recipes name it


def is_downloadable(path: str) -> bool:
    """Whether `path` is that of the demo's model, and nothing is there yet."""
    return Path(path) == Path(DEMO_MODEL) and not Path(path).exists()
