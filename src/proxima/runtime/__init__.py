"""Runtime: the loop, and what survives it. Read `controller.py` top to bottom and you have read the method.

    execution      any run: folder, resume, loop, summary     run   `proxima train`      build      config → objects
    loop           what loops have in common                  controller   the loop of RL
    algorithm      what a step trains on                      learner      weights and updates
    interrupt      Ctrl-C
    journal, folder, store, rollouts, carried_groups   what survives a kill              resume, inputs
    held_out, eval_suites, eval_run, inference   evaluation and generation without training
    observer       who is told       clock      the time

Imports: every room below (`rollout`, `train`, `evaluate`, `config` …). Imported by `lab`, `view` and `cli`.
To add a stage: a method of `Controller` between its neighbours; a state in `journal.py` if it can be interrupted; a
test that kills it. A forward pass before the advantages or the update is a `proxima.train.ForwardStage`.
"""
