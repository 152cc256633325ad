"""Peers: other frameworks' numbers compared with ours, and their options converted to ours.

    verify/    their recorded numbers against our mathematics         convert/   their options as one of our recipes
    cli/       the commands of both

No code of a peer is imported or executed; its numbers come as golden records, its options as a file.
Imports: `proxima.core`, `proxima.laws` (verify), `proxima.config` and the tables it names (convert). proxima does not
import it, but finds the commands through entry points.
To add a peer: see `verify/__init__.py` for its numbers, `convert/__init__.py` for its options.
"""

__version__ = "0.1.0"
