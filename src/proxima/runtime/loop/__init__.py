"""The loops: steps, evaluations and checkpoints in order. `controller.Controller.train` shows the whole method.

    training_loop   the part common to both loops: when they evaluate and save, how they stop and end; the services
                    that any part of a run may need
    controller      the loop of RL
    offline_loop    the loop over a fixed data set, and the order of its items
    publisher       weights for the engine, its turns with the trainer on shared devices, and its reports
    step_review     the numbers of a step, its warnings, and the conditions that end the run after it

Imports: `training`, `rollout`, `evaluation` and below, `state`, `watch`. Imported by `resume`, `launch` and the rooms
above `runtime`.
To add a stage of a step: a method of `Controller` between its neighbours; a state in `state/journal.py` if it can be
interrupted, and a test that kills it.
"""
