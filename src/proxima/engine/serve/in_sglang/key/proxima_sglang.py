"""Starts SGLang with its key from the environment: on the command line, every user of the machine could read it."""

import os
import sys

if __name__ == "__main__":  # not in the processes that it spawns, which import this module too
    from sglang.cli.main import main

    if key := os.environ.pop("PROXIMA_SERVER_KEY", ""):
        sys.argv += ["--api-key", key]
    main()
