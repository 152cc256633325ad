"""Plot surrogates, or what happened in a run.

proxima plot surrogate ppo_clip cppo drpo,epsilon=0.2  # loss and gradient weight over the ratio and the probability
proxima plot threshold runs/mine                       # cppo along a completion: Z = w |pi - mu|, threshold, masked
proxima plot threshold                                 # the same for an example
proxima plot divergence runs/mine                      # ratio and difference of pi and mu by probability
proxima plot run runs/mine --out curve.svg             # reward and held-out accuracy by step, for a README"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.cli.completion import complete_surrogate
from proxima.cli.parameters import Actions, Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.view.chart import Drawing

KIND = "one to eight: a name of `proxima list surrogate`, or package.module:Class; with fields: cppo,delta=0.2"
MU = "probability of the token; one row for each; default: 0.3"
POSITION = "cppo: position of the token in its completion, from 1; default: 11"
DRIFT = "cppo: |pi - mu| of the completion's other tokens; default: 0.045"
SURROGATE = "such as cppo,delta=0.1,delta_b=0.01; default: the run's, or cppo"
IMPORT_CODE = "import what the run's algorithm names outside proxima, which runs its code"

RunPath = Annotated[Path, Argument("run folder", "RUN")]
OneStep = Annotated[int | None, Argument("one step of the run; default: every step", "N")]
Out = Annotated[str, Argument("an .svg or a .png; default: %(default)s in the current folder", "FILE")]


def surrogates_figure(
    kind: Annotated[Sequence[str], Argument(KIND, "KIND", words="+", complete=complete_surrogate)],
    *,
    out: Out = "surrogate.svg",
    advantage: Annotated[float, Argument("magnitude of the advantage; default: 1", "A")] = 1.0,
    behavior_probability: Annotated[Sequence[float], Argument(MU, "MU", words="+")] = (0.3,),
    only: Annotated[Literal["loss", "weight"] | None, Argument("one of the two quantities; default: both")] = None,
    over: Annotated[Literal["ratio", "probability"] | None, Argument("one of the two x axes; default: both")] = None,
    position: Annotated[int, Argument(POSITION, "T")] = 11,
    length: Annotated[int, Argument("cppo: tokens of the completion; default: 21", "T")] = 21,
    drift: Annotated[float, Argument(DRIFT, "D")] = 0.045,
) -> None:
    """Loss and gradient weight of surrogates, for both signs of the advantage."""
    surrogates = {name: parse_surrogate(name) for name in dict.fromkeys(kind)}
    from proxima.view.surrogate_curve import TokenSetting
    from proxima.view.surrogate_plot import draw

    setting = TokenSetting(
        advantage=advantage,
        behavior_probability=tuple(dict.fromkeys(behavior_probability)),
        position=position,
        length=length,
        drift=drift,
    )
    quantities: Sequence[Literal["loss", "weight"]] = [only] if only else ["loss", "weight"]
    axes: Sequence[Literal["ratio", "probability"]] = [over] if over else ["ratio", "probability"]
    _write(draw(surrogates, setting, quantities=quantities, over=axes), out, "surrogate.svg")


def threshold_figure(
    run_folder: Annotated[Path | None, Argument("run folder; without one, an example is drawn", "RUN")] = None,
    *,
    out: Out = "threshold.svg",
    step: OneStep = None,
    completion: Annotated[
        str | None, Argument("such as 12:3; default: the one with the most masked tokens", "UID:SAMPLE")
    ] = None,
    surrogate: Annotated[str | None, Argument(SURROGATE, "KIND")] = None,
    import_code: Annotated[bool, Argument(IMPORT_CODE)] = False,
) -> None:
    """cppo along one completion of a run: each token, its threshold, and what it masks."""
    from proxima.config.describe import kind_of
    from proxima.core.surrogate import Cppo
    from proxima.lab.divergences import measurable, read_algorithm, read_trained
    from proxima.view.threshold_plot import EXAMPLE, ThresholdFigure, most_masked

    asked = measurable(parse_surrogate(surrogate)) if surrogate else None
    if surrogate and asked is None:
        raise UserError(f"--surrogate {surrogate}: only cppo with a finite delta and divergence binary_tv fits")
    if run_folder is None:
        if step is not None or completion:
            raise UserError("--step and --completion are of a run; give its folder")
        return _write(ThresholdFigure.of(EXAMPLE, asked or Cppo()), out, "threshold.svg")
    completions = read_trained(run_folder, step)
    algorithm = read_algorithm(run_folder, import_code=import_code)
    own = algorithm.surrogate
    spec = asked or measurable(own) or Cppo()
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
    drawn = keys[completion] if completion else most_masked(completions, spec)
    _write(ThresholdFigure.of(drawn, spec, used), out, "threshold.svg")


def divergence_figure(run_folder: RunPath, *, out: Out = "divergence.svg", step: OneStep = None) -> None:
    """Ratio and difference of pi and mu in a run, over the probability of the sampled token."""
    from proxima.lab.divergences import read_trained
    from proxima.view.divergence_plot import DivergenceFigure

    _write(DivergenceFigure.of(read_trained(run_folder, step), str(run_folder)), out, "divergence.svg")


def run_figure(run_folder: RunPath, *, out: Out = "run.svg") -> None:
    """Mean reward and held-out accuracy of a run by step."""
    from proxima.view.curve import LearningCurve

    _write(LearningCurve.of(run_folder), out, "run.svg")


def parse_surrogate(word: str) -> Any:
    """Build the spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`; ConfigError as for `spec_from_words`."""
    from proxima.cli.check import spec_from_words

    kind, *words = word.split(",")
    return spec_from_words("surrogate", kind, words)


def _write(figure: "Drawing", out: str, default: str) -> None:
    """Write the figure and print its path, with `(replaced)` if a file with the default name existed."""
    from proxima.view.chart import write_figure

    file = Path(out)
    replaced = file.is_file() and out == default
    print(f"{write_figure(figure, file)}{' (replaced)' if replaced else ''}")


PLOTS: dict[str, Callable[..., None]] = {
    "surrogate": surrogates_figure,
    "threshold": threshold_figure,
    "divergence": divergence_figure,
    "run": run_figure,
}
COMMAND = Actions(PLOTS, metavar=" | ".join(PLOTS))
