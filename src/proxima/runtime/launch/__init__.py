"""From a config to a run: `run` is `proxima train`, `offline_run` its siblings, `eval_run` is `proxima eval`."""
