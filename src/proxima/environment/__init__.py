"""Environments: worlds and tools that a model acts in over several turns.

    protocol     what a user writes: `Environment`, `Reply`

Imports: stdlib, `proxima.data`; in a worker process also transformers, for the schemas of tools. Imported by `rollout`
and the rooms above.
To add one: a class with `reset` and tools or `respond`, a line in `ENVIRONMENTS`, episodes of it, right and broken, in
`tests/environment/test_<name>.py`. Out of tree: `environment: my_pkg.worlds:Maze`.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import Kinds, lazy_imports

if TYPE_CHECKING:
    from proxima.environment.protocol import Environment, Reply

__getattr__, __dir__ = lazy_imports(__name__)

ENVIRONMENTS = Kinds({})

__all__ = ["ENVIRONMENTS", "Environment", "Reply"]
