"""Training on a fixed data set: SFT, reward models and DPO are an `OfflineMethod` each; the loop knows none.

    method         what the loop asks of a method        offline_run    a run from its config
    offline_data   rows → items, and their order         offline_loop   the loop, and completions to look at
Imports: as `runtime`. Imported by `api` and `cli`, through `offline_run`.
To add a method: its section in `config.offline_schema`, its objective in `train.objectives`, a subclass of
`OfflineMethod` here, and its line in `METHODS` of `offline_run`.
"""
