"""Training: items and an objective in, new weights out. The stack knows no RL; every objective uses the same one.

`proxima.train(recipe, overrides)`, the package called as a function, is `proxima.api.train`: a whole run.

    stack         optimizer, schedule, gradient clipping, micro-batches, state
    objectives/   what is minimised: `PolicyObjective` in RL, `PreferenceObjective` in DPO …
    forward_stage   what runs before the update           optimizer    optimizers and learning-rate schedules
    teacher_stage   what distillation asks a teacher
    engine_stage    the same of an engine elsewhere, and of a reference
    early_stop   leaves out the epochs after one in which the policy has moved far enough
    checkpoint   writes and reads checkpoints
Imports: torch, numpy, safetensors, `proxima.data`, `core`, `model`, the protocol of `engine`. Imported by `runtime`.
To add an optimizer: a frozen spec with `build(parameters)` and a line in `OPTIMIZERS`. To add an objective: see
`proxima.train.objectives`. To add a forward pass before the advantages or the update: a `ForwardStage`, given to
`proxima.runtime.launch.run.train(stages=…)`.
"""

import sys
from typing import TYPE_CHECKING

from proxima import CallableRoom
from proxima.data.kinds import Kinds, lazy_imports

if TYPE_CHECKING:
    from proxima.train.early_stop import EarlyStop
    from proxima.train.forward_stage import ForwardStage, LogProbStage, ScoreVarianceStage, ValueStage, stage_columns
    from proxima.train.objectives import (
        Objective,
        PolicyObjective,
        PreferenceObjective,
        TokenStatistics,
        ValueObjective,
    )
    from proxima.train.optimizer import AdamW, Schedule
    from proxima.train.stack import TrainStack, UpdateResult

__getattr__, __dir__ = lazy_imports(__name__)

OPTIMIZERS = Kinds({"adamw": "proxima.train.optimizer:AdamW"})

__all__ = [
    "OPTIMIZERS", "AdamW", "EarlyStop", "ForwardStage", "LogProbStage", "Objective", "PolicyObjective",
    "PreferenceObjective", "Schedule", "ScoreVarianceStage", "TokenStatistics", "TrainStack", "UpdateResult",
    "ValueObjective", "ValueStage", "stage_columns",
]  # fmt: skip

sys.modules[__name__].__class__ = CallableRoom
