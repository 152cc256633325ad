"""proxima: trust-region reinforcement learning for language models.

    proxima.train(recipe, overrides)    proxima.evaluate(model, task="gsm8k")    proxima.load_run("runs/mine")

These are functions of `proxima.api`; proxima's documentation of Python describes them. `proxima.core` is
the mathematics alone. Importing this package imports none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from proxima.version import __version__

if TYPE_CHECKING:
    from proxima.api.evaluation import evaluate
    from proxima.api.saved import load_run
    from proxima.api.training import train
    from proxima.data.errors import UserError
    from proxima.runtime.loop.training_loop import RunEnded


__all__ = ["RunEnded", "UserError", "__version__", "evaluate", "load_run", "train"]

_MODULES = {  # imported at first use: `import proxima` and `proxima.core` must not load a trainer
    "RunEnded": "proxima.runtime.loop.training_loop",
    "UserError": "proxima.data.errors",
    "evaluate": "proxima.api.evaluation",
    "load_run": "proxima.api.saved",
    "train": "proxima.api.training",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'proxima' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
