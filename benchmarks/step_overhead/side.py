"""One step of 256 completions × 512 tokens on a tiny model: CPU seconds inside the model and the decoder, and outside.

Runs on any source tree (`--source`), so that commits can be compared. Functions are patched by name: the time of the
model, the decoder, sampling, autograd and the optimizer is counted, the rest of the process is the host's.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPENT: dict[str, float] = {}
_depth = 0


def timed(owner: Any, name: str, label: str) -> None:
    """Count the CPU time of a function or method, except for calls from within another counted one."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _depth
        if _depth:
            return function(*args, **kwargs)
        _depth += 1
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            SPENT[label] = SPENT.get(label, 0.0) + time.process_time() - start

    setattr(owner, name, wrapper)


def _none(holder: Any) -> Any:
    """Return an empty collection of stop tokens, so that every completion uses all its tokens."""
    import numpy as np

    return frozenset() if isinstance(holder.stop_tokens, frozenset) else np.zeros(0, np.int64)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--source", required=True, help="root of a source tree: the folder that holds src/ and tests/")
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--completions", type=int, default=8)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--profile", action="store_true", help="print the host functions that take the most time")
    o = p.parse_args()
    root = Path(o.source).resolve()
    sys.path[:0] = [str(root / "src"), str(root)]

    import torch

    import proxima.engine.fast_decoder as fast
    import proxima.engine.local as local
    from proxima.config import resolve
    from proxima.model import Policy
    from proxima.runtime.launch.run import train
    from tests.tiny import make_tiny

    torch.set_num_threads(1)
    for name in ("prefill", "step", "logits", "load"):
        timed(fast.FastDecoder, name, "decoder")
    for module in [m for name, m in sys.modules.items() if name.startswith("proxima.engine")]:
        if hasattr(module, "sample_tokens") and module.__name__ != "proxima.engine.sampler":
            timed(module, "sample_tokens", "sampling")
    timed(Policy, "__call__", "model")
    timed(torch.Tensor, "backward", "model")
    timed(torch.optim.AdamW, "step", "optimizer")
    create = local.LocalEngine.__init__

    def endless(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        holder = getattr(self, "scheduler", self)  # earlier versions keep them in the engine
        holder.stop_tokens = _none(holder)

    local.LocalEngine.__init__ = endless  # type: ignore[method-assign]

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": o.tokens + 256}))
        tree = {
            "model": {"path": str(model), "compute_dtype": "float32", "device": "cpu"},
            "task": {"kind": "arithmetic", "low": 1, "high": 99, "size": 4 * o.prompts},
            "reward": [{"kind": "number"}, {"kind": "length", "tokens": o.tokens, "weight": 1e-3}],
            "algorithm": {"preset": "cppo", "skip_zero_advantage": False, "selection": []},
            "engine": {"kind": "local", "dtype": "float32", "slots": 64},
            "sampling": {"max_tokens": o.tokens},
            "train": {"steps": 2, "prompts_per_step": o.prompts, "completions_per_prompt": o.completions},
            "eval": {"before": False, "after": False},
            "runtime": {"threads": 1},
            "folder": str(Path(folder) / "run"),
        }
        resolved = resolve(tree)
        marks: list[dict[str, float]] = []

        from proxima.runtime.watch import observer

        class Marks(getattr(observer, "NullObserver", observer.Observer)):  # its name in earlier versions
            def step(self, record: Any, sample: Any) -> None:
                marks.append({"total": time.process_time(), **SPENT})

        profile = None
        if o.profile:
            import cProfile

            profile = cProfile.Profile()
            profile.enable()
        train(resolved.config, resolved=resolved, observer=Marks())
        if profile is not None:
            import pstats

            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    first, second = marks  # the second step: imports and caches are warm
    spent = {key: second[key] - first.get(key, 0.0) for key in second}
    host = spent["total"] - sum(value for key, value in spent.items() if key != "total")
    tokens = o.prompts * o.completions * o.tokens
    print(json.dumps({"tokens": tokens, "host": host, **spent}))


if __name__ == "__main__":
    main()
