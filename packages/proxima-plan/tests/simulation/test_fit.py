"""What a simulation takes from a run: its lengths, prompt by prompt."""

import pyarrow.parquet as parquet

from proxima.runtime.state.folder import RunFolder
from proxima_plan.simulation.fit import observed_run
from tests.cli.conftest import here, run, trained

__all__ = ["here", "run", "trained"]


def test_the_lengths_of_a_run_stay_with_their_prompts(run):
    """Two steps of two prompts with two completions."""
    assumed, steps, _ = observed_run("run")
    assert [record["step"] for record in steps] == [1, 2]
    rows = [row for step in (1, 2) for row in parquet.read_table(RunFolder("run").rollout_file(step)).to_pylist()]
    by_prompt = sorted((row["prompt_uid"], row["sample"], len(row["tokens"])) for row in rows)
    assert assumed.observed.values == tuple(length for _, _, length in by_prompt) and len(by_prompt) == 8
    assert assumed.observed.together == 2 and assumed.accepted == 1.0
    assert assumed.prompt == round(sum(len(row["prompt_tokens"]) for row in rows) / 8)
