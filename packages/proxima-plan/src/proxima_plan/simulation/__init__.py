"""Simulated runs: the real `Controller` and collectors on virtual time, with parts that only take time.

    times    the durations of a plan, with the lengths and the speed of a finished run where one is given
    timed_engine   one or many replicas: continuous batching, pauses, new weights
    parts    prompts, rewards, selection, trainer, store
    simulated_run  one run, with speed, idle shares and lag as in a real run
    fit      lengths and speed of a finished run
    lags     runs for many lags and concurrent prompts
    scale    runs on more and more devices, and their bottlenecks
    simulated_answers  lags and numbers of devices, as facts and as text

Admission, order and lag are decided by `rollout` and `runtime`, never here.
Imports: the plan of a step, and every room of proxima. Imported by `cli`. To add something that a plan does not
know: a field of `Assumptions` in `times`, and the part that spends it.
"""
