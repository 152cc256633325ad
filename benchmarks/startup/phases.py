"""`python phases.py FILE WORD…`: run `proxima WORD…` and write to FILE when its phases ended, in seconds after START,
an environment variable with a reading of `time.monotonic`."""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ends = {"Python": time.monotonic()}


def timed(place: str, phase: str) -> None:
    """Record the end of the first call of `module:function` or `module:Class.method`."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        ends.setdefault(phase, time.monotonic())
        return result

    setattr(owner, name, call)


def main() -> None:
    from proxima.cli.main import main as proxima
    from proxima.view.run_views import RunViews

    shown = RunViews.progress

    def before_libraries(*arguments: Any) -> None:
        """Record the time of a run's first message, which it prints before it imports the rest."""
        RunViews.progress = shown  # type: ignore[method-assign]
        ends["torch imported, recipe read"] = time.monotonic()
        shown(*arguments)
        timed("proxima.runtime.launch.run:_workload", "transformers imported, questions read")
        timed("proxima.runtime.launch.run:_load_weights", "weights read")
        timed("proxima.view.run_views:RunViews.started", "engine and optimizer made")
        timed("proxima.engine.scheduler:Scheduler.step", "first tokens")
        timed("proxima.view.run_views:RunViews.step", "first step ended")

    RunViews.progress = before_libraries  # type: ignore[method-assign]
    file, sys.argv = Path(sys.argv[1]), ["proxima", *sys.argv[2:]]
    code = proxima()
    start = float(os.environ["START"])
    file.write_text(json.dumps({phase: end - start for phase, end in ends.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
