"""`proxima` with ranks that wait longer for one another at the start than `placement.timeout`: that is for what hangs
later, and a machine may be slow."""

import sys

from proxima.cli.main import main
from proxima.runtime.placement import rendezvous

if __name__ == "__main__":
    rendezvous._patience = lambda placement: rendezvous.MEET_SECONDS
    sys.exit(main())
