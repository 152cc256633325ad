"""Runtime: the loop, and what survives it. Read `controller.py` top to bottom and you have read the method.

    run            a run from its config: validate, load, build, loop, summarise        build      config → objects
    controller     the loop          algorithm  what a step trains on                    learner    weights and updates
    interrupt      Ctrl-C
    journal, folder, store, rollouts, carried_groups   what survives a kill              resume, inputs
    held_out, eval_suites, eval_run, inference   evaluation and generation without training
    observer       who is told       clock      the time

Imports: every room below (`rollout`, `train`, `evaluate`, `config` …). Imported by `lab`, `view` and `cli`.
To add a stage: a method of `Controller` between its neighbours; a state in `journal.py` if it can be interrupted; a
test that kills it. A forward pass before the advantages or the update is a `proxima.train.ForwardStage`.
"""
