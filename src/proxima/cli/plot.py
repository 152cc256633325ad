"""Draw surrogates: loss and gradient weight over the ratio and the probability, for both signs of the advantage.

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
    below.add_argument("--advantage", type=float, default=1.0, metavar="A", help="size of the advantage; 1")
    below.add_argument(
        "--behavior-probability",
        type=float,
        nargs="+",
        default=[0.3],
        metavar="MU",
        help="of the token; a row each; 0.3",
    )
    below.add_argument("--only", choices=["loss", "weight"], help="one of the two quantities; none: both")
    below.add_argument("--over", choices=["ratio", "probability"], help="one of the two x axes; none: both")
    below.add_argument(
        "--position", type=int, default=11, metavar="T", help="cppo: place of the token in its completion, from 1; 11"
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
    surrogates = {word: surrogate_of(word) for word in dict.fromkeys(arguments.kind)}
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


def surrogate_of(word: str) -> Any:
    """The spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`.

    Raises:
        ConfigError: no such kind or field, or a value that the field can't take.
    """
    import yaml

    from proxima.config.coerce import Mismatch, coerce
    from proxima.config.describe import fields_of, lookup
    from proxima.config.errors import one_problem, suggestion
    from proxima.config.scalars import Loader
    from proxima.config.schema import Slot
    from proxima.config.tree import COMMAND_LINE, node_of

    kind, *pairs = word.split(",")
    cls = lookup(kind, Slot("proxima.core.surrogate:SURROGATES"), "surrogate", "command line")
    fields = {field.name: field for field in fields_of(cls)}
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in fields:
            remedy = suggestion(name, fields) if equals else "write field=value"
            raise one_problem(
                f"surrogate.{name}", f"{kind!r} has no field {name!r}; {remedy}", text or None, "command line"
            )
        try:
            values[name] = coerce(
                node_of(yaml.load(text, Loader), COMMAND_LINE), fields[name].hint
            )  # our Loader is a SafeLoader
        except (Mismatch, yaml.YAMLError) as error:
            raise one_problem(f"surrogate.{name}", str(error).splitlines()[0], text, "command line") from None
    return cls(**values)
