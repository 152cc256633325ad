"""Simulated runs: the real `Controller` and collectors on virtual time, with parts that only take time.

    times    the durations of a plan, with the lengths and the speed of a finished run where one is given
    engine   one or many replicas: continuous batching, pauses, new weights
    parts    prompts, rewards, selection, trainer, store
    run      one run, with speed, idle shares and lag as in a real run
    fit      lengths and speed of a finished run
    lags     runs for many lags and concurrent prompts
    scale    runs on more and more devices, and their bottlenecks

Admission, order and lag are decided by `rollout` and `runtime`, never here.
"""
