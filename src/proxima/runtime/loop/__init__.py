"""The loops: steps, evaluations and checkpoints in order. `controller` is that of RL, `offline_loop` of a fixed
data set."""
