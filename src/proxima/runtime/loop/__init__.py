"""The loops: steps, evaluations and checkpoints in order. Read `controller.Controller.train` and you have the method.

    training_loop   what both loops have in common: when they evaluate and save, how they stop and end
    controller      the loop of RL            offline_loop   that of a fixed data set
    services        what any part of a run may need: its store, its observer, the thread of the tensor work
    publisher       new weights for the engine, and what the run hears from it
    shared_devices  an engine that sleeps while the trainer has its devices
    step_review     what a step tells the user, and what ends the run after it      step_metrics   its numbers

Imports: `train`, `rollout`, `evaluate` and below, `state`, `watch`. Imported by `launch` and the
rooms above `runtime`.
To add a stage of a step: a method of `Controller` between its neighbours; a state in `state/journal.py` if it can be
interrupted, and a test that kills it.
"""
