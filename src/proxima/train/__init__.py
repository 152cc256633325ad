"""Training: trajectories go in, one optimizer step comes out. The same stack serves every trainer.

`micro_batch.py` cuts by token budget, `optimizer.py` has optimizers and schedules, `trainer.py` is the update,
`checkpoint.py` writes and reads.
Imports: torch, safetensors, `proxima.data`, `proxima.core`, `proxima.model`. Imported by `runtime`.
To add an optimizer: a frozen spec with `build(parameters)` and a line in `OPTIMIZERS`.
"""

from proxima.train.optimizer import OPTIMIZERS, AdamW, learning_rate_factor
from proxima.train.trainer import Trainer, TrajectoryFacts, UpdateResult

__all__ = ["OPTIMIZERS", "AdamW", "Trainer", "TrajectoryFacts", "UpdateResult", "learning_rate_factor"]
