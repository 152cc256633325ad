"""A port in a process of its own, which says after each line of its input whether it still serves; for a campaign.
`python -m tests.system.opened_port NAME FOLDER`."""

import sys
from contextlib import suppress
from pathlib import Path

from tests.system.test_strangers import PORTS

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    with PORTS[name](name, folder) as (stranger, answers):
        print(f":{stranger.port}", flush=True)
        for _ in sys.stdin:
            served = False
            with suppress(OSError, IndexError):  # its connection was closed, among too many others
                served = answers()
            print(served, flush=True)
