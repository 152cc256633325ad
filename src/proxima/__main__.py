"""`python -m proxima`, the command `proxima`."""

import sys

from proxima.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
