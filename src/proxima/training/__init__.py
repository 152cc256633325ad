"""Training: items and an objective in, new weights out. The stack knows no RL; every objective uses the same one.

    stack           optimizer, schedule, gradient clipping, state; shared_update: the passes of an update
    ranks           several processes that share an update, by shares, and what rank 0 sends the others;
                    process_ranks: over torch.distributed
    objectives/     what is minimised: `PolicyObjective` in RL, `PreferenceObjective` in DPO …
    batch_builder   scored groups → the batch of a step: advantages, selection, updates; the outcomes of its completions
    episode_tokens  the same for a per-token advantage: rewards and turns of episodes
    learner         from that batch to new weights: critic, stages, objective, stack; leaves out completions on which
                    engine and trainer differ too much, and ends the epochs once the policy has moved far enough
    critic          a critic: a separate model, or a head; its loss
    forward_stage   fills columns before the update: log-probs, what advantages read, those of a teacher or an engine
    next_policy     the same for log-probs under the next version, with state across steps
    optimizer       AdamW, learning-rate schedules, restoring their state; optimizer_8bit, optimizer_muon
    checkpoint      writes, checks and restores checkpoints; sharded_checkpoint: writes those of many ranks
    offline/        the methods of training on a fixed data set
A completion is its key (uid, sample, turn) in the batch, the updates and the statistics; `TrainStack.update` gets
items, which an objective builds from trajectories.
Imports: torch, numpy, safetensors, `proxima.data`, `core`, `model`, the protocol of `engine`, what `rollout` collects,
and for `offline` rows of `task` and figures of `evaluation`. Imported by `config`, `runtime` and `experiments`; it
imports none of them, so it can train without a run: examples/train_from_trajectories.py.
To add an optimizer: a frozen spec with `build(parameters)` and a line in `OPTIMIZERS`. To add an objective: see
`proxima.training.objectives`. To add a forward pass before the advantages or the update: a `ForwardStage`, made in
`proxima.runtime.launch.learning`. To add an offline method: see `proxima.training.offline`.
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
