"""Plot surrogates, or what happened in a run.

proxima plot surrogate ppo_clip cppo drpo,epsilon=0.2  # loss and gradient weight over the ratio and the probability
proxima plot threshold runs/mine                       # cppo along a completion: Z = w |pi - mu|, threshold, masked
proxima plot divergence runs/mine                      # ratio and difference of pi and mu by probability
proxima plot run runs/mine --out curve.svg             # reward and held-out accuracy by step, for a README
proxima plot timeline runs/mine --steps 3:8            # who works and who waits: trainer, engine, rewards, prompts"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proxima.cli.completion import complete_surrogate
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.view.chart import Drawing
    from proxima.view.surrogate_curve import TokenSetting

KIND = "one to eight: a name of `proxima list surrogate`, or package.module:Class; with fields: cppo,delta=0.2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar=" | ".join(PLOTS), required=True)

    def command(name: str, line: str, run: str = "", steps: str = "") -> Callable[..., argparse.Action]:
        below = what.add_parser(name, description=f"{line.capitalize()}.", help=line)
        out = f"an .svg or a .png; default: {name}.svg in the current folder"
        below.add_argument("--out", default=f"{name}.svg", metavar="FILE", help=out)
        if run:
            below.add_argument("run_folder", metavar="RUN", help=run)
        if steps:
            below.add_argument("--step", type=int, metavar="N", help=steps)
        return below.add_argument

    one_step = "one step of the run; default: every step"
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
    along = "cppo along one completion of a run: each token, its threshold, and what it masks"
    add = command("threshold", along, "run folder", one_step)
    add("--completion", metavar="UID:SAMPLE", help="such as 12:3; default: the one with the most masked tokens")
    add("--surrogate", metavar="KIND", help="such as cppo,delta=0.1,delta_b=0.01; default: the run's, or cppo")
    names = "import what the run's algorithm names outside proxima, which runs its code"
    add("--import-code", action="store_true", help=names)
    far = "ratio and difference of pi and mu in a run, over the probability of the sampled token"
    command("divergence", far, "run folder", one_step)
    command("run", "mean reward and held-out accuracy of a run by step", "run folder")
    stages = "the stages of a few steps over time: trainer, engine, rewards, and each prompt"
    add = command("timeline", stages, "run folder, also of a running or killed run")
    add("--steps", metavar="FIRST:LAST", help="such as 3:8, or one step; default: the last six")


def run(arguments: argparse.Namespace) -> int:
    from proxima.view.chart import write_figure

    out = Path(arguments.out)
    replaced = out.is_file() and arguments.out == f"{arguments.what}.svg"  # a name nobody typed
    print(f"{write_figure(PLOTS[arguments.what](arguments), out)}{' (replaced)' if replaced else ''}")
    return 0


def run_figure(folder: Path) -> "Drawing":
    """`proxima plot run`."""
    from proxima.view.curve import LearningCurve

    return LearningCurve.of(folder)


def divergence_figure(folder: Path, step: int | None = None) -> "Drawing":
    """`proxima plot divergence`."""
    from proxima.lab.divergences import read_trained
    from proxima.view.divergence_plot import DivergenceFigure

    return DivergenceFigure.of(read_trained(folder, step), str(folder))


def timeline_figure(folder: Path, steps: str | None = None) -> "Drawing":
    """`proxima plot timeline`."""
    from proxima.lab.run_reader import existing_run
    from proxima.view.timeline_plot import timeline_of_run

    run = existing_run(folder)
    return timeline_of_run(run.timeline, run.path.resolve().name, steps)


def threshold_figure(
    folder: Path,
    step: int | None = None,
    completion: str | None = None,
    surrogate: str | None = None,
    *,
    import_code: bool = False,
) -> "Drawing":
    """`proxima plot threshold`; says on standard error where the run had another surrogate."""
    from proxima.config.describe import kind_of
    from proxima.core.surrogate import Cppo
    from proxima.lab.divergences import measurable, read_algorithm, read_trained
    from proxima.view.threshold_plot import ThresholdFigure, most_masked

    completions = read_trained(folder, step)
    algorithm = read_algorithm(folder, import_code=import_code)
    own = algorithm.surrogate
    spec = measurable(parse_surrogate(surrogate) if surrogate else own)
    if surrogate and spec is None:
        raise UserError(f"--surrogate {surrogate}: only cppo with a finite delta and divergence binary_tv fits")
    spec = spec or Cppo()
    keys = {f"{each.prompt_uid}:{each.sample}": each for each in reversed(completions)}
    if completion and completion not in keys:
        near = ", ".join(f"{each.prompt_uid}:{each.sample}" for each in completions[:3])
        raise UserError(f"--completion {completion}: no such trained completion; there are {near} …")
    used = "" if own == spec else kind_of(own or algorithm.preference)
    if isinstance(own, Cppo):
        pairs = ((field.name, getattr(own, field.name), getattr(spec, field.name)) for field in fields(Cppo))
        used = ",".join([used, *(f"{name}={value}" for name, value, drawn in pairs if value != drawn)])
    if used and not surrogate:
        print(f"the run used {used}, which has no such threshold: drawn is what cppo would have done", file=sys.stderr)
    return ThresholdFigure.of(keys[completion] if completion else most_masked(completions, spec), spec, used)


def surrogates_figure(
    kinds: Sequence[str],
    setting: "TokenSetting",
    *,
    only: Literal["loss", "weight"] | None = None,
    over: Literal["ratio", "probability"] | None = None,
) -> "Drawing":
    """`proxima plot surrogate`."""
    from proxima.view.surrogate_plot import draw

    surrogates = {kind: parse_surrogate(kind) for kind in dict.fromkeys(kinds)}
    return draw(
        surrogates,
        setting,
        quantities=[only] if only else ["loss", "weight"],
        over=[over] if over else ["ratio", "probability"],
    )


def _surrogates(arguments: argparse.Namespace) -> "Drawing":
    from proxima.view.surrogate_curve import TokenSetting

    arguments.behavior_probability = tuple(dict.fromkeys(arguments.behavior_probability))
    setting = TokenSetting(**{field.name: getattr(arguments, field.name) for field in fields(TokenSetting)})
    return surrogates_figure(arguments.kind, setting, only=arguments.only, over=arguments.over)


def parse_surrogate(word: str) -> Any:
    """The spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`; ConfigError as `spec_from_words`."""
    from proxima.cli.check import spec_from_words

    kind, *words = word.split(",")
    return spec_from_words("surrogate", kind, words)


PLOTS: dict[str, Callable[[argparse.Namespace], "Drawing"]] = {
    "surrogate": _surrogates,
    "threshold": lambda a: threshold_figure(
        Path(a.run_folder), a.step, a.completion, a.surrogate, import_code=a.import_code
    ),
    "divergence": lambda a: divergence_figure(Path(a.run_folder), a.step),
    "run": lambda a: run_figure(Path(a.run_folder)),
    "timeline": lambda a: timeline_figure(Path(a.run_folder), a.steps),
}
