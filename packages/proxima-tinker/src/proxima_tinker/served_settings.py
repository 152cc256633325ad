"""Settings of a server: the options of its command that the service reads."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from proxima.cli.parameters import Argument
from proxima.data import require

MAX_LENGTH = "tokens of the longest sequence, for a model whose position factors depend on it (longrope)"
NAME = "the name by which clients ask for the model; default: its path"
DTYPE = "of matrix products; weights are float32; auto (default): that of the folder, or the faster one on this machine"
WORKERS = "calls of different clients that compute at the same time, on the cores divided by it; 1 is fastest for one"


def _count(meaning: str) -> Argument:
    return Argument(f"{meaning}; default: %(default)s", "N", read=int, group="counts")


@dataclass(frozen=True)
class Settings:
    """Settings of a server. `dtype` is that of products and of the engine's cache."""

    path: Annotated[str, Argument("Hugging Face folder or hub name, or a .gguf file", "MODEL")]
    _: KW_ONLY
    folder: Annotated[Path, Argument("state of models, and their records")] = Path("runs/served")
    name: Annotated[str | None, Argument(NAME)] = None
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto"
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], Argument(DTYPE)] = "auto"
    workers: Annotated[int, _count(WORKERS)] = 1
    tokens: Annotated[int, _count("of one forward pass of training")] = 4096
    slots: Annotated[int, _count("completions of one sampler at a time")] = 64
    engines: Annotated[int, _count("samplers in memory, a copy of the model each")] = 4
    models: Annotated[int, _count("models in memory; of more, those that nobody uses rest on disk")] = 16
    max_body_mb: Annotated[int, _count("MiB of a request")] = 64
    max_length: Annotated[int | None, Argument(MAX_LENGTH)] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            possible = not isinstance(value, int) or 1 <= value <= 1 << 20
            require(possible, f"--{name.replace('_', '-')}", value, "must be in [1, 1048576]")
