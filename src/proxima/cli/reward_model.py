"""Train a reward model on pairs of completions, from a recipe with a section `reward_model`. Everything that the run
writes is in its folder, which is printed first; the table at the end is of the last evaluation."""

import argparse
import sys

from proxima.cli.train import add_run_arguments as add_arguments
from proxima.cli.train import run_command

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    code = run_command(arguments)
    if not arguments.quiet and arguments.run_folder is not None:
        from proxima.runtime.state.folder import RunFolder
        from proxima.view.eval_tables import pair_table
        from proxima.view.terminal import rendered

        records = [record for record in RunFolder(arguments.run_folder).read_metrics() if record["kind"] == "eval"]
        if records:
            print(rendered(pair_table(records[-1]), sys.stdout))
    return code
