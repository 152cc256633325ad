"""Plot surrogates: loss and gradient weight over the ratio and the probability, for both signs of the advantage.

A KIND is a name of `proxima list surrogate`, package.module:Class, or either with fields: ppo_clip,epsilon_high=0.28
"""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="surrogate", required=True)
    below = what.add_parser(
        "surrogate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, help="surrogates"
    )
    below.add_argument(
        "kind", nargs="+", metavar="KIND", help="one to eight; with fields: dppo,divergence=binary_kl,delta=0.05"
    )
    below.add_argument("--out", default="surrogate.svg", metavar="FILE", help="an .svg or a .png; surrogate.svg")
    below.add_argument("--advantage", type=float, default=1.0, metavar="A", help="magnitude of the advantage; 1")
    below.add_argument(
        "--behavior-probability",
        type=float,
        nargs="+",
        default=[0.3],
        metavar="MU",
        help="of the token; one row each; 0.3",
    )
    below.add_argument("--only", choices=["loss", "weight"], help="one of the two quantities; default: both")
    below.add_argument("--over", choices=["ratio", "probability"], help="one of the two x axes; default: both")
    below.add_argument(
        "--position",
        type=int,
        default=11,
        metavar="T",
        help="cppo: position of the token in its completion, from 1; 11",
    )
    below.add_argument("--length", type=int, default=21, metavar="T", help="cppo: tokens of the completion; 21")
    below.add_argument(
        "--drift",
        type=float,
        default=0.045,
        metavar="D",
        help="cppo: |pi - mu| of the completion's other tokens; 0.045",
    )


def run(arguments: argparse.Namespace) -> int:
    surrogates = {word: parse_surrogate(word) for word in dict.fromkeys(arguments.kind)}
    from proxima.view.surrogate_curve import TokenSetting
    from proxima.view.surrogate_plot import draw, write_plot

    setting = TokenSetting(
        advantage=arguments.advantage,
        behavior_probability=tuple(dict.fromkeys(arguments.behavior_probability)),
        position=arguments.position,
        length=arguments.length,
        drift=arguments.drift,
    )
    quantities: Any = [arguments.only] if arguments.only else ["loss", "weight"]
    over: Any = [arguments.over] if arguments.over else ["ratio", "probability"]
    print(write_plot(draw(surrogates, setting, quantities=quantities, over=over), arguments.out))
    return 0


def parse_surrogate(word: str) -> Any:
    """The spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`.

    Raises:
        ConfigError: no such kind or field, or a value that the field can't take.
    """
    from proxima.config.builder import Builder
    from proxima.config.describe import fields_of
    from proxima.config.recipe_reader import read_overrides
    from proxima.config.schema import AlgorithmConfig
    from proxima.config.tree import COMMAND_LINE, NO_LAYOUT, Node

    kind, *pairs = word.split(",")
    fields = read_overrides(pairs, NO_LAYOUT).mapping or {}
    info = next(info for info in fields_of(AlgorithmConfig) if info.name == "surrogate")
    builder = Builder()
    spec = builder.slot(info, Node({"kind": Node(kind, COMMAND_LINE, kind), **fields}, COMMAND_LINE), "surrogate")
    builder.finish()
    return spec
