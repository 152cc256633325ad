"""Training: items and an objective in, new weights out. The stack knows no RL; every objective uses the same one.

`proxima.train(recipe, overrides)`, the package called as a function, is `proxima.api.train`: a whole run.

    stack           optimizer, schedule, gradient clipping, state; shared_update: the passes of an update
    ranks           several processes that share an update, by shares; messages: what rank 0 tells the others
    objectives/     what is minimised: `PolicyObjective` in RL, `PreferenceObjective` in DPO …
    batch_builder   scored groups → the batch of a step: advantages, selection, updates; completion_record: outcomes
    learner         from that batch to new weights: critic, stages, objective, stack
    critic          a critic: a separate model, or a head
    forward_stage   fills columns before the update: log-probs; advantage_stages: what advantages read;
                    teacher_stage, engine_stage: from others
    mismatch_rejection   leaves completions out on which engine and trainer differ too much
    next_policy     the same for log-probs under the next version, with state across steps
    early_stop      skips the remaining epochs once the policy has moved far enough
    optimizer       AdamW and learning-rate schedules; optimizer_8bit, optimizer_muon: the other kinds;
                    optimizer_step: their base, and moments in host memory; optimizer_state: reads and restores it;
                    one_pass_adamw: AdamW, clipping and norms in C++
    checkpoint      writes checkpoints; checkpoint_restore: reads the last one; sharded_checkpoint: those of many ranks
    offline/        the methods of training on a fixed data set
A completion is its key (uid, sample, turn) in the batch, the updates and the statistics; `TrainStack.update` gets
items, which an objective builds from trajectories.
Imports: torch, numpy, safetensors, `proxima.data`, `core`, `model`, the protocol of `engine`, what `rollout` collects,
and for `offline` rows of `task` and figures of `evaluate`. Imported by `config`, `runtime` and `experiments`; it
imports none of them, so it can train without a run: examples/train_from_trajectories.py.
To add an optimizer: a frozen spec with `build(parameters)` and a line in `OPTIMIZERS`. To add an objective: see
`proxima.train.objectives`. To add a forward pass before the advantages or the update: a `ForwardStage`, made in
`proxima.runtime.launch.forward_passes`. To add an offline method: see `proxima.train.offline`.
"""

import sys
from typing import TYPE_CHECKING

from proxima import CallableRoom
from proxima.data.kinds import Kinds, lazy_imports

if TYPE_CHECKING:
    from proxima.train.advantage_stages import ScoreVarianceStage, ValueStage
    from proxima.train.early_stop import EarlyStop
    from proxima.train.forward_stage import ForwardStage, LogProbStage, stage_columns
    from proxima.train.objectives.policy_objective import PolicyObjective
    from proxima.train.objectives.preference_objective import PreferenceObjective
    from proxima.train.objectives.protocol import Objective, TokenStatistics
    from proxima.train.objectives.value_objective import ValueObjective
    from proxima.train.optimizer import AdamW, Schedule
    from proxima.train.stack import TrainStack, UpdateResult

__getattr__, __dir__ = lazy_imports(__name__)

OPTIMIZERS = Kinds(
    {
        "adamw": "proxima.train.optimizer:AdamW",
        "adamw_8bit": "proxima.train.optimizer_8bit:AdamW8bit",
        "muon": "proxima.train.optimizer_muon:Muon",
    }
)

__all__ = [
    "OPTIMIZERS", "AdamW", "EarlyStop", "ForwardStage", "LogProbStage", "Objective", "PolicyObjective",
    "PreferenceObjective", "Schedule", "ScoreVarianceStage", "TokenStatistics", "TrainStack", "UpdateResult",
    "ValueObjective", "ValueStage", "stage_columns",
]  # fmt: skip

sys.modules[__name__].__class__ = CallableRoom
