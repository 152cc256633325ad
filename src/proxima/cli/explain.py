"""Show a recipe: its comment, every value with origin and meaning, the batch arithmetic, memory and time.

Reads no weights and needs no data: missing data files are warnings."""

import argparse
import sys

from proxima.cli.common import add_overrides, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, or a run folder (its config.yaml)")
    add_overrides(parser)
    parser.add_argument("--yaml", action="store_true", help="print the resolved config as a recipe")
    parser.add_argument("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config import check, dump, resolve
    from proxima.config.errors import ConfigError
    from proxima.config.machine_checks import data_files_exist

    resolved = resolve(arguments.recipe, arguments.override)
    to_make = list(data_files_exist(resolved))  # a warning here, an error of `train`
    problems = [problem for problem in check(resolved) if problem not in to_make]
    if arguments.yaml:
        print(dump(resolved), end="")
        for problem in to_make:
            print(f"WARNING {problem}", file=sys.stderr)
    elif arguments.json:
        from proxima.config.explain import as_json

        print_json(as_json(resolved))
    else:
        from proxima.config.explain import explain, terminal_width

        print(explain(resolved, width=terminal_width(sys.stdout)))
    if problems:  # after the values, among which the mistake is easier to see
        raise ConfigError(problems)
    return 0
