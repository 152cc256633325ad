"""Plot surrogates, or the learning curve of a run.

proxima plot surrogate ppo_clip cppo drpo,epsilon=0.2    loss and gradient weight over the ratio and the probability
proxima plot run runs/mine --out curve.svg               reward and held-out accuracy by step, for a README"""

import argparse
from typing import Any

KIND = (
    "one to eight: a name of `proxima list surrogate` or package.module:Class; with fields: ppo_clip,epsilon_high=0.28"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="surrogate | run", required=True)
    line = "loss and gradient weight of surrogates, for both signs of the advantage"
    add = what.add_parser("surrogate", description=line.capitalize() + ".", help=line).add_argument
    add("kind", nargs="+", metavar="KIND", help=KIND)
    add("--out", default="surrogate.svg", metavar="FILE", help="an .svg or a .png; surrogate.svg in the current folder")
    add("--advantage", type=float, default=1.0, metavar="A", help="magnitude of the advantage; 1")
    mu = "of the token; one row each; 0.3"
    add("--behavior-probability", type=float, nargs="+", default=[0.3], metavar="MU", help=mu)
    add("--only", choices=["loss", "weight"], help="one of the two quantities; default: both")
    add("--over", choices=["ratio", "probability"], help="one of the two x axes; default: both")
    position = "cppo: position of the token in its completion, from 1; 11"
    add("--position", type=int, default=11, metavar="T", help=position)
    add("--length", type=int, default=21, metavar="T", help="cppo: tokens of the completion; 21")
    drift = "cppo: |pi - mu| of the completion's other tokens; 0.045"
    add("--drift", type=float, default=0.045, metavar="D", help=drift)
    line = "mean reward and held-out accuracy of a run by step"
    add = what.add_parser("run", description=line.capitalize() + ".", help=line).add_argument
    add("run", metavar="RUN", help="run folder")
    add("--out", default="curve.svg", metavar="FILE", help="an .svg; curve.svg in the current folder")


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "run":
        from proxima.view.curve import write_curve

        print(write_curve(arguments.run, arguments.out))
        return 0
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
    """The spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`; ConfigError as `spec_from_words`."""
    from proxima.cli.check import spec_from_words

    kind, *fields = word.split(",")
    return spec_from_words("surrogate", kind, fields)
