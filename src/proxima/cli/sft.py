"""Fine-tune a model on given answers, from a recipe with a section `sft`. Everything that the run writes is in its
folder, which is printed first."""

from proxima.cli.train import add_run_arguments as add_arguments
from proxima.cli.train import run_command as run

__all__ = ["add_arguments", "run"]
