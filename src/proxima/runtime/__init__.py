"""Runtime: the loop and what it leaves. Read `controller.py` top to bottom and you have read the method.

`run.py` builds a run from its config and ends it; `controller.py` is the loop, `collect.py` fills its batch,
`algorithm.py` says what a step trains on, `evaluation.py` asks the held-out questions, `exam.py` those of `proxima
eval`; `journal.py`, `carried_groups.py`, `rollouts.py` and `folder.py` are what survives a kill; `observer.py` is who
watches, `clock.py` the time.
Imports: every room below (`task`, `reward`, `engine`, `model`, `train`, `config`). Imported by `view` (observer and
files) and `cli`.
To add a stage: a method of `Controller` between its neighbours; a state in `journal.py` if it can be interrupted; a
test that kills it.
"""
