"""Log-probs of a frozen model, computed once for a data set and stored on disk."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from proxima.data.columns import Floats
from proxima.data.trajectory import Trajectory
from proxima.system.atomic_files import write_atomic

FORMAT = "1"


def cached_log_probs(
    folder: Path | None,
    model: Mapping[str, str],
    trajectories: Sequence[Trajectory],
    compute: Callable[[], list[Floats]],
) -> list[Floats]:
    """[T] float32, nats, of each of the trajectories: those on disk, or the result of `compute`, which is then stored.
    A file that is damaged or for other tokens is computed and written again.

    Args:
        folder: has a file for each model and data set; it is created when something is written. None: store nothing.
        model: determines the numbers together with the tokens: hashes of the weights, and settings, by name.
    """
    if folder is None:
        return compute()
    key = _key(model, trajectories)
    file = folder / f"{key}.safetensors"
    log_probs = _read(file, key, trajectories)
    if log_probs is None:
        log_probs = compute()
        joined = np.concatenate(log_probs)
        facts = {"format": FORMAT, "key": key, "sha256": sha256(joined.tobytes()).hexdigest()}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save({"log_prob": joined}, metadata=facts))
    return log_probs


def _key(model: Mapping[str, str], trajectories: Sequence[Trajectory]) -> str:
    """SHA-256 of the model and of all tokens, with the temperatures."""
    digest = sha256(repr((FORMAT, sorted(model.items()))).encode())
    for item in trajectories:
        digest.update(repr((len(item.prompt_tokens), len(item.tokens), item.temperature)).encode())
        digest.update(item.prompt_tokens.tobytes())
        digest.update(item.tokens.tobytes())
    return digest.hexdigest()


def _read(file: Path, key: str, trajectories: Sequence[Trajectory]) -> list[Floats] | None:
    """The log-probs in a file; None if it is missing or invalid."""
    with suppress(OSError, SafetensorError):
        with safe_open(file, "numpy") as opened:
            facts = opened.metadata() or {}
            joined = opened.get_tensor("log_prob")
        ends = np.cumsum([len(item.tokens) for item in trajectories])
        intact = facts.get("key") == key and facts.get("sha256") == sha256(joined.tobytes()).hexdigest()
        if intact and joined.dtype == np.float32 and joined.shape == (ends[-1],):
            return np.split(joined, ends[:-1])
    return None
