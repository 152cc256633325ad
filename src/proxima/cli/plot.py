"""Plot surrogates, or what happened in a run.

proxima plot surrogate ppo_clip cppo drpo,epsilon=0.2  # loss and gradient weight over the ratio and the probability
proxima plot threshold runs/mine                       # cppo along a completion: Z = w |pi - mu|, threshold, masked
proxima plot divergence runs/mine                      # ratio and difference of pi and mu by probability
proxima plot run runs/mine --out curve.svg             # reward and held-out accuracy by step, for a README
proxima plot timeline runs/mine --steps 3:8            # who works and who waits: trainer, engine, rewards, prompts"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from proxima.cli.completion import complete_surrogate
from proxima.data import UserError

KIND = "one to eight: a name of `proxima list surrogate`, or package.module:Class; with fields: cppo,delta=0.2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar=" | ".join(PLOTS), required=True)

    def command(name: str, line: str) -> Callable[..., argparse.Action]:
        below = what.add_parser(name, description=f"{line.capitalize()}.", help=line)
        out = f"an .svg{'' if name == 'run' else ' or a .png'}; default: {name}.svg in the current folder"
        below.add_argument("--out", default=f"{name}.svg", metavar="FILE", help=out)
        return below.add_argument

    add = command("surrogate", "loss and gradient weight of surrogates, for both signs of the advantage")
    named: Any = add("kind", nargs="+", metavar="KIND", help=KIND)
    named.completer = complete_surrogate
    add("--advantage", type=float, default=1.0, metavar="A", help="magnitude of the advantage; default: 1")
    mu = "probability of the token; one row for each; default: 0.3"
    add("--behavior-probability", type=float, nargs="+", default=[0.3], metavar="MU", help=mu)
    add("--only", choices=["loss", "weight"], help="one of the two quantities; default: both")
    add("--over", choices=["ratio", "probability"], help="one of the two x axes; default: both")
    position = "cppo: position of the token in its completion, from 1; default: 11"
    add("--position", type=int, default=11, metavar="T", help=position)
    add("--length", type=int, default=21, metavar="T", help="cppo: tokens of the completion; default: 21")
    drift = "cppo: |pi - mu| of the completion's other tokens; default: 0.045"
    add("--drift", type=float, default=0.045, metavar="D", help=drift)
    add = command("threshold", "cppo along one completion of a run: each token, its threshold, and what it masks")
    add("run_folder", metavar="RUN", help="run folder")
    add("--step", type=int, metavar="N", help="one step of the run; default: every step")
    add("--completion", metavar="UID:SAMPLE", help="such as 12:3; default: the one with the most masked tokens")
    add("--surrogate", metavar="KIND", help="such as cppo,delta=0.1,delta_b=0.01; default: the run's, or cppo")
    names = "import what the run's algorithm names outside proxima, which runs its code"
    add("--import-code", action="store_true", help=names)
    add = command("divergence", "ratio and difference of pi and mu in a run, over the probability of the sampled token")
    add("run_folder", metavar="RUN", help="run folder")
    add("--step", type=int, metavar="N", help="one step of the run; default: every step")
    command("run", "mean reward and held-out accuracy of a run by step")("run_folder", metavar="RUN", help="run folder")
    add = command("timeline", "the stages of a few steps over time: trainer, engine, rewards, and each prompt")
    add("run_folder", metavar="RUN", help="run folder, also of a running or killed run")
    add("--steps", metavar="FIRST:LAST", help="such as 3:8, or one step; default: the last six")


def run(arguments: argparse.Namespace) -> int:
    replaced = Path(arguments.out).is_file() and arguments.out == f"{arguments.what}.svg"  # a name nobody typed
    print(f"{PLOTS[arguments.what](arguments)}{' (replaced)' if replaced else ''}")
    return 0


def _plot_run(arguments: argparse.Namespace) -> Path:
    from proxima.view.curve import write_curve

    return write_curve(arguments.run_folder, arguments.out)


def _plot_divergence(arguments: argparse.Namespace) -> Path:
    from proxima.lab.divergences import read_trained
    from proxima.view.chart import write_figure
    from proxima.view.divergence_plot import DivergenceFigure

    completions = read_trained(Path(arguments.run_folder), arguments.step)
    return write_figure(DivergenceFigure.of(completions, arguments.run_folder), arguments.out)


def _plot_timeline(arguments: argparse.Namespace) -> Path:
    from proxima.lab.run_reader import existing_run
    from proxima.view.chart import write_figure
    from proxima.view.timeline_plot import timeline_of_run

    run = existing_run(arguments.run_folder)
    return write_figure(timeline_of_run(run.timeline, run.path.resolve().name, arguments.steps), arguments.out)


def _plot_threshold(arguments: argparse.Namespace) -> Path:
    from proxima.config.describe import kind_of
    from proxima.core.surrogate import Cppo
    from proxima.lab.divergences import measurable, read_algorithm, read_trained
    from proxima.view.chart import write_figure
    from proxima.view.threshold_plot import ThresholdFigure, most_masked

    given = arguments.surrogate
    completions = read_trained(Path(arguments.run_folder), arguments.step)
    algorithm = read_algorithm(Path(arguments.run_folder), import_code=arguments.import_code)
    own = algorithm.surrogate
    if given:
        spec = measurable(parse_surrogate(given))
        if spec is None:
            raise UserError(f"--surrogate {given}: only cppo with a finite delta and divergence binary_tv fits")
    else:
        spec = measurable(own) or Cppo()
    chosen = most_masked(completions, spec)
    if arguments.completion:
        wanted = [it for it in completions if f"{it.prompt_uid}:{it.sample}" == arguments.completion]
        if not wanted:
            near = ", ".join(f"{it.prompt_uid}:{it.sample}" for it in completions[:3])
            raise UserError(f"--completion {arguments.completion}: no such trained completion; there are {near} …")
        chosen = wanted[0]
    used = "" if own == spec else kind_of(own or algorithm.preference)
    if isinstance(own, Cppo):
        pairs = ((field.name, getattr(own, field.name), getattr(spec, field.name)) for field in fields(Cppo))
        used = ",".join([used, *(f"{name}={value}" for name, value, drawn in pairs if value != drawn)])
    if used and not given:
        print(f"the run used {used}, which has no such threshold: drawn is what cppo would have done", file=sys.stderr)
    return write_figure(ThresholdFigure.of(chosen, spec, used), arguments.out)


def _plot_surrogates(arguments: argparse.Namespace) -> Path:
    surrogates = {word: parse_surrogate(word) for word in dict.fromkeys(arguments.kind)}
    from proxima.view.chart import write_figure
    from proxima.view.surrogate_curve import TokenSetting
    from proxima.view.surrogate_plot import draw

    arguments.behavior_probability = tuple(dict.fromkeys(arguments.behavior_probability))
    setting = TokenSetting(**{field.name: getattr(arguments, field.name) for field in fields(TokenSetting)})
    quantities: Any = [arguments.only] if arguments.only else ["loss", "weight"]
    over: Any = [arguments.over] if arguments.over else ["ratio", "probability"]
    return write_figure(draw(surrogates, setting, quantities=quantities, over=over), arguments.out)


def parse_surrogate(word: str) -> Any:
    """The spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`; ConfigError as `spec_from_words`."""
    from proxima.cli.check import spec_from_words

    kind, *words = word.split(",")
    return spec_from_words("surrogate", kind, words)


PLOTS = {
    "surrogate": _plot_surrogates,
    "threshold": _plot_threshold,
    "divergence": _plot_divergence,
    "run": _plot_run,
    "timeline": _plot_timeline,
}
