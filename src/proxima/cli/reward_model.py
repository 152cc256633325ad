"""Train a reward model on pairs of completions, from a recipe with a section `reward_model`. Everything that the run
writes is in its folder, which is printed first."""

import argparse

from proxima.cli.train import add_run_arguments, run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "reward")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.offline_schema import RewardModelConfig

    return run_command(arguments, RewardModelConfig)
