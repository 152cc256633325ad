"""Plot surrogates, or what happened in a run.

proxima plot surrogate ppo_clip cppo drpo,epsilon=0.2  # loss and gradient weight over the ratio
proxima plot threshold runs/mine                       # cppo along a completion
proxima plot threshold                                 # the same for an example
proxima plot divergence runs/mine                      # pi against mu; thresholds for it
proxima plot divergence mine.yaml                      # the same of its first steps"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from proxima.cli.parameters import Argument, Overrides, Recipe, print_json
from proxima.cli.train import train_recipe
from proxima.data import UserError
from proxima.system.user_files import find_recipe
from proxima.view.chart import Drawing, figure_file, write_figure

KIND = "one to eight: a name of `proxima list surrogate`, or package.module:Class; with fields: cppo,delta=0.2"
MU = "probability of the token; one row for each; default: 0.3"
SURROGATE = "such as cppo,delta=0.1,delta_b=0.01; default: the run's, or cppo"
STEPS = 2  # trained of a recipe
AS_JSON = "print the thresholds for programs, and draw nothing"
IMPORT_CODE = "import what the run's algorithm names outside proxima, which runs its code"

OneStep = Annotated[int | None, Argument("one step of the run; default: every step", "N")]
Out = Annotated[str, Argument("an .svg, a .png or a .pdf; default: %(default)s in the current folder", "FILE")]


def surrogates_figure(
    kind: Annotated[Sequence[str], Argument(KIND, "KIND", words="+")],
    *,
    out: Out = "surrogate.svg",
    behavior_probability: Annotated[Sequence[float], Argument(MU, "MU", words="+")] = (0.3,),
    only: Annotated[Literal["loss", "weight"] | None, Argument("one of the two quantities; default: both")] = None,
    over: Annotated[Literal["ratio", "probability"] | None, Argument("one of the two x axes; default: both")] = None,
) -> None:
    """Loss and gradient weight of surrogates, for both signs of the advantage."""
    from proxima.view import surrogate_plot

    surrogates = {name: surrogate_plot.parse_surrogate(name) for name in dict.fromkeys(kind)}
    mus = tuple(dict.fromkeys(behavior_probability))
    quantities: Sequence[Literal["loss", "weight"]]
    if only:
        quantities = [only]
    else:
        quantities = ["loss", "weight"]
    axes: Sequence[Literal["ratio", "probability"]]
    if over:
        axes = [over]
    else:
        axes = ["ratio", "probability"]
    _write(surrogate_plot.draw(surrogates, mus, quantities=quantities, over=axes), out)


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
    from proxima.view.token_plots import threshold_of_run

    _write(threshold_of_run(run_folder, step, completion, surrogate, import_code=import_code), out)


def divergence_figure(
    recipe: Recipe,
    override: Overrides = (),
    *,
    out: Out = "divergence.svg",
    step: OneStep = None,
    share: Annotated[float, Argument("share of the tokens beyond the threshold delta; 0.001", "P")] = 0.001,
    import_code: Annotated[bool, Argument(IMPORT_CODE)] = False,
    as_json: Annotated[bool, Argument(AS_JSON, flag="--json")] = False,
) -> None:
    """Ratio and difference of pi and mu in a run, over the probability of the sampled token, and the thresholds of cppo
    that follow from them.

    A recipe is trained for 2 steps, or train.steps=N, without a trust region, in runs/NAME-divergence or the given
    folder. A run has only what its own trust region left.
    """
    if not 0 < share < 1:
        raise UserError(f"--share {share:g} must be between 0 and 1")
    folder = Path(recipe)
    is_run = (folder / "run.sqlite").is_file()
    if is_run and override:
        raise UserError(f"{folder} is a run, whose settings are fixed; give its recipe to measure others")
    from proxima.view import token_plots

    figure_file(out)
    if is_run:
        surrogate = token_plots.surrogate_of_run(folder, import_code=import_code)
    else:
        surrogate = token_plots.surrogate_of(recipe, override)
        folder = warm_up(recipe, override)
    completions, calibration = token_plots.calibrated(folder, step, surrogate, share)
    if as_json:
        return print_json({**vars(calibration), "spec": vars(calibration.spec), "folder": str(folder)})
    print("\n".join(token_plots.threshold_lines(calibration, share, folder)))
    return _write(token_plots.DivergenceFigure.of(completions, str(folder)), out)


def warm_up(recipe: str, overrides: Sequence[str]) -> Path:
    """Train the recipe's first steps with an unbounded surrogate on every completion; return the run's folder."""
    given = {name: value for name, _, value in (word.partition("=") for word in overrides)}
    folder = Path(given.get("folder", f"runs/{Path(recipe).stem}-divergence"))
    settings = {
        "folder": json.dumps(str(folder)),
        "train.steps": given.get("train.steps", STEPS),
        "algorithm.surrogate": "{kind: cppo, delta: .inf, delta_b: .inf}",
        "algorithm.skip_zero_advantage": "false",
        "eval.before": "false",
        "eval.after": "false",
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    words = with_settings(overrides, settings)
    code = train_recipe(str(find_recipe(recipe)), words, overwrite="folder" not in given, quiet=True)
    if code:
        raise SystemExit(code)
    return folder


def with_settings(overrides: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The overrides with these values in place of any for the same fields, or for fields below them."""
    fields = [text.partition("=")[0].strip() for text in overrides]
    kept = [
        text
        for field, text in zip(fields, overrides, strict=True)
        if not any(field == name or field.startswith(f"{name}.") for name in values)
    ]
    return [*kept, *(f"{name}={value}" for name, value in values.items())]


def _write(figure: Drawing, out: str) -> None:
    """Write the figure and print its path, with `(replaced)` if the file existed."""
    file = Path(out)
    replaced = file.is_file()
    written = write_figure(figure, file)
    note = " (replaced)" if replaced else ""
    print(f"{written}{note}")


COMMAND = {"surrogate": surrogates_figure, "threshold": threshold_figure, "divergence": divergence_figure}
