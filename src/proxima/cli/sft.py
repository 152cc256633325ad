"""Fine-tune a model on given answers, from a recipe with a section `sft`. Everything that the run writes is in its
folder, which is printed first."""

import argparse

from proxima.cli.train import add_run_arguments, run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "sft")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.offline_schema import SftConfig

    return run_command(arguments, SftConfig)
