"""The output of `proxima plan`: stages, memory, traffic and layouts; tables of lags and of numbers of devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxima.view.formatting import NONE, count, duration, fixed, percent, rate
from proxima_plan.devices import GIB
from proxima_plan.memory import CONTEXT, FRAGMENTED

if TYPE_CHECKING:
    from proxima_plan.forecast import StepPlan
    from proxima_plan.proposals import Proposal
    from proxima_plan.rehearsal.rehearsal import Rehearsal
    from proxima_plan.simulation.lags import SimulatedCell
    from proxima_plan.simulation.scale import ScaledRun


def text_of_plan(plan: "StepPlan", steps: int) -> str:
    """The plan of a layout: a line for each stage, then memory and network traffic. `steps`: of the run; 0: unknown."""
    load, memory, micro = plan.load, plan.memory, plan.micro_batch
    engine, trainer = plan.sides
    kind = plan.devices.kind
    lines = [f"layout   {plan.layout}, on {plan.devices}"]
    if kind.source == "measured":
        measured = f"{1000 * kind.bf16:,.0f} GFLOP/s of products, {1000 * kind.bandwidth:,.0f} GB/s of memory"
        lines.append(f"         measured here, for each rank: {measured}")
    if (idle := plan.devices.count - plan.layout.devices) > 0:
        lines.append(f"idle     {idle} of {plan.devices.count} devices: the layout takes {plan.layout.devices}")
    if memory.fits:
        how = f"; engines and ranks at once, {duration(engine)} and {duration(trainer)}" if plan.overlaps else ""
        lines.append(f"step     about {duration(plan.seconds)}, {rate(plan.speed)} a device; {plan.binds} binds{how}")
        lines += _stages(plan)
        if steps:
            lines.append(f"run      about {duration(steps * plan.seconds)} for {steps:,} steps, without evaluations")
    elif 0 < micro < load.micro_tokens:
        lines.append(f"step     none: it does not fit, but with train.tokens_per_micro_batch={micro}")
    else:
        lines.append("step     none: it does not fit; --propose looks for layouts that do")
    lines += _memory(plan, micro)
    sent: dict[str, float] = {}
    for stage in plan.stages:
        for group, size in stage.sent.items():
            sent[group] = sent.get(group, 0.0) + size
    if sent and memory.fits:
        lines.append(f"network  sent by a rank in each step: {_sizes(sent)}")
    return "\n".join(lines)


def _stages(plan: "StepPlan") -> list[str]:
    load = plan.load
    mean, most = f"{load.mean:,.0f}", f"{load.largest(load.sequences):,}"
    what = "completions" if load.generates else "examples"
    lines = [f"         for {what} of {mean} tokens on average, the longest of {load.sequences:,} with {most}"]
    for stage in plan.stages:
        parts = sorted(stage.parts.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {_seconds(value)}" for name, value in parts if value > 0.02 * stage.seconds)
        lines.append(f"         {stage.name:<9}{_seconds(stage.seconds):>9}   {said}".rstrip())
    return lines


def _memory(plan: "StepPlan", micro: int) -> list[str]:
    memory = plan.memory
    total = f"{memory.needed / GIB:.1f} GiB of {memory.memory / GIB:.1f}"
    lines = [f"memory   {'fits' if memory.fits else 'does not fit'}: {total} on a device, by the {memory.source}"]
    lines.append(f"         a rank: {_sizes(memory.trainer)}")
    if memory.engine:
        running = f"{memory.slots:,} completions at once" if memory.slots else "no room for a completion"
        lines.append(f"         an engine's device: {_sizes(memory.engine)}; {running}")
    if memory.host:
        lines.append(f"         in host memory, of each rank: {memory.host / GIB:,.2f} GiB")
    if plan.load.beside:
        lines.append(f"         reward models: {plan.load.beside / GIB:,.2f} GiB")
    lines.append(f"         and {CONTEXT / GIB:.0f} GiB of CUDA, {FRAGMENTED:.0%} of a rank for fragments")
    none = "none: the longest sequence does not fit a rank, or an engine does not"
    largest = f"of {micro:,} tokens" if micro else none
    lines.append(f"         largest micro-batch {largest}; it has {plan.load.micro_tokens:,}")
    return lines


def text_of_rehearsal(rehearsal: "Rehearsal", estimate: int) -> str:
    """The counted bytes beside those of the formula, and the waits."""
    ratio = estimate / rehearsal.peak - 1
    counted = f"{rehearsal.peak / GIB:.2f} GiB of a rank, counted in {rehearsal.seconds:.0f} s"
    waits = ", ".join(f"{what} {times}" for what, times in sorted(rehearsal.waits.items()))
    return f"exact    {counted}; by the formula {ratio:+.0%}\n         the host waits for the device: {waits}"


def text_of_proposals(proposals: Sequence["Proposal"]) -> str:
    """A table of layouts, and the words of the command line that set each."""
    lines = ["layouts  step       tok/s a device     memory   binds                         layout"]
    for number, proposal in enumerate(proposals, 1):
        plan = proposal.plan
        size = f"{plan.memory.needed / GIB:.0f} GiB"
        figures = f"{_seconds(plan.seconds):<11}{plan.speed:<19,.0f}{size:<9}{plan.binds:<30}"
        lines.append(f"     {number:>2}  {figures}{plan.layout}")
    for number, proposal in enumerate(proposals, 1):
        note = "    # trains on completions of the step before" if "runtime.max_lag=1" in proposal.words else ""
        lines.append(f"\n  {number}{note}\n    {' '.join(proposal.words)}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _sizes(sizes: "dict[str, int] | dict[str, float]") -> str:
    return "  ".join(f"{name} {size / GIB:,.2f}" for name, size in sizes.items() if size) + " GiB"


# ---- simulated runs --------------------------------------------------------------------------------------------------


def lag_row(cell: "SimulatedCell") -> dict[str, str]:
    """Return the row of a lag, by column."""
    figures = cell.run.figures
    return {
        "lag": str(cell.lag),
        "concurrent": "sync" if cell.concurrent is None else str(cell.concurrent),
        "tok/s": count(figures.tokens_per_second),
        "steps/h": fixed(figures.steps_per_hour, 1),
        "trainer idle": percent(figures.idle_trainer),
        "engine idle": percent(figures.idle_engine),
        "mean lag": fixed(figures.mean_lag),
        "max lag": count(figures.max_lag),
        "evicted": count(figures.evicted),
        "× lag 0": fixed(cell.speed_up),
    }


def scale_row(run: "ScaledRun") -> dict[str, str]:
    """Return the row of a number of devices, by column."""
    return {
        "devices": count(run.devices),
        "run": "async" if run.lag else "sync",
        "engines": f"{run.layout.engines} × {run.layout.engine_devices}" if run.layout else NONE,
        "tok/s": count(run.tokens_per_second) if run.layout else NONE,
        "per device": count(run.per_device) if run.layout else NONE,
        "step s": fixed(run.step_seconds, 1) if run.layout else NONE,
        "binds": run.binds,
    }
