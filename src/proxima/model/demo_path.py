"""The path of the demo's model, which `demo_model` downloads."""

from pathlib import Path

DEMO_MODEL = "models/smollm2-135m-instruct"  # relative to the current folder, as the recipes name it


def is_downloadable(path: str) -> bool:
    """True if `path` is that of the demo's model and does not exist yet."""
    return Path(path) == Path(DEMO_MODEL) and not Path(path).exists()


def fetched(path: str) -> bool:
    """Download the demo's model if `path` is its path and it does not exist yet; True if it did not."""
    if not is_downloadable(path):
        return False
    from proxima.model.demo_model import download_demo_model

    download_demo_model(Path(path))
    return True
