"""Train a model on preferences, by DPO or a relative, from a recipe with a section `preference`. Everything that the
run writes is in its folder, which is printed first."""

import argparse

from proxima.cli.train import add_run_arguments, run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "dpo")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.preference_schema import PreferenceConfig

    return run_command(arguments, PreferenceConfig)
