"""What survives a kill: the journal, the run folder, rollouts as Parquet, checkpoints, and what a resume checks."""
