"""Rehearse a recipe's training step for devices that you don't have yet: does it fit, and what does it wait for?

Whole steps run on a fake device, with the real architecture and no weights: memory is counted, not estimated. Only the
engine's memory is estimated, as by `proxima explain`. Exit code 1: it does not fit, or a step would fail."""

from typing import TYPE_CHECKING, Annotated

from proxima.cli.output import AsJson, ImportCode, Overrides, Recipe, print_json
from proxima.cli.parameters import Argument

if TYPE_CHECKING:
    from proxima.lab.rehearsal.device_fit import DeviceFit

DEVICES = "what to rehearse for, as 8xH100-80G; the weights are spread over all of them"


def rehearse(
    recipe: Recipe,
    override: Overrides = (),
    *,
    devices: Annotated[str, Argument(DEVICES, "NxDEVICE")] = "H100-80G",
    import_code: ImportCode = False,
    as_json: AsJson = False,
) -> int:
    """Print faults, memory and waits; return 1 if it does not fit or a step would fail."""
    from proxima.config import check, resolve
    from proxima.config.problems import ConfigError
    from proxima.config.validate import all_problems, fetch_demo_model, to_do
    from proxima.lab.plan.devices import read_devices
    from proxima.lab.rehearsal.device_fit import rehearse_recipe

    asked = read_devices(devices)
    with all_problems():
        resolved = resolve(recipe, override, root=None, import_code=import_code)
    left = to_do(resolved)
    if problems := [problem for problem in check(resolved) if problem not in left]:
        raise ConfigError(problems)
    fetch_demo_model(resolved)
    fit = rehearse_recipe(str(recipe), override, asked, import_code=import_code)
    if as_json:
        print_json(fit.as_json())
    else:
        print(text_of_fit(fit))
    return 0 if fit.passed else 1


def text_of_fit(fit: "DeviceFit") -> str:
    """List faults, the memory of a device by kind, suggested changes, and waits."""
    rehearsal, lines = fit.rehearsal, [f"fault    {fault}" for fault in fit.rehearsal.faults]
    need, have = (f"{size / 2**30:.1f} GiB" for size in (fit.needed, fit.devices.memory))
    verdict = "fits" if fit.fits else "does not fit"
    lines.append(f"memory   {verdict}: {need} of {have} on each of {fit.devices}")
    lines.append("         " + "  ".join(f"{kind} {size / 2**30:.2f}" for kind, size in fit.parts.items()))
    if fit.estimate is not None and rehearsal.peak:
        ratio = fit.estimate / rehearsal.peak - 1
        lines.append(
            f"         counted in the step: {rehearsal.peak / 2**30:.1f} GiB; the formula of `proxima explain`, "
            f"which knows neither fragments nor CUDA, gives {fit.estimate / 2**30:.1f}, {ratio:+.0%}"
        )
    if not fit.fits and not fit.advice:
        lines.append("change   no known change is enough: it needs a larger device")
    for change in fit.advice:
        verdict = ", which fits" if change.needed <= fit.devices.memory else ""
        lines.append(f"change   {change.word}: about {change.needed / 2**30:.1f} GiB{verdict}")
    updates, micro = rehearsal.updates, rehearsal.micro_batches
    inside, total = rehearsal.inside, sum(rehearsal.waits.values())
    lines.append(f"waits    {inside} inside {micro} micro-batches, {total - inside} beside them in {updates} updates")
    for wait, count in sorted(rehearsal.waits.items(), key=lambda item: (not item[0].inside, item[0])):
        where = "in a micro-batch" if wait.inside else "in an update"
        lines.append(f"         {count:>3}  {wait.place}  {wait.what}, {where}")
    lines.append(f"time     {rehearsal.seconds:.0f} s to rehearse")
    return "\n".join(lines)


COMMAND = rehearse
