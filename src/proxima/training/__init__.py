"""Training: items and an objective in, new weights out. The stack knows no RL; every objective uses the same one.

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
`proxima.training.objectives`. To add a forward pass before the advantages or the update: a `ForwardStage`, made in
`proxima.runtime.launch.forward_passes`. To add an offline method: see `proxima.training.offline`.
"""

from proxima.data.kinds import Kinds

OPTIMIZERS = Kinds(
    {
        "adamw": "proxima.training.optimizer:AdamW",
        "adamw_8bit": "proxima.training.optimizer_8bit:AdamW8bit",
        "muon": "proxima.training.optimizer_muon:Muon",
    }
)

__all__ = ["OPTIMIZERS"]
