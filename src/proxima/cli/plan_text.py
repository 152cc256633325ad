"""The output of `proxima explain --devices`: stages, memory, traffic and layouts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxima.lab.plan.devices import GIB

if TYPE_CHECKING:
    from proxima.lab.plan.proposals import Proposal
    from proxima.lab.plan.step_plan import StepPlan


def text_of_plan(plan: "StepPlan") -> str:
    """The plan of a layout: a line for each stage, then memory and network traffic."""
    from proxima.view.formatting import duration

    load, memory, micro = plan.load, plan.memory, plan.micro_batch
    engine, trainer = plan.sides
    lines = [f"layout   {plan.layout}, on {plan.devices}"]
    if (idle := plan.devices.count - plan.layout.devices) > 0:
        lines.append(f"idle     {idle} of {plan.devices.count} devices: the layout takes {plan.layout.devices}")
    if memory.fits:
        how = f"; engines and ranks at once, {duration(engine)} and {duration(trainer)}" if plan.overlaps else ""
        speed = f"{plan.speed:,.0f} tokens/s a device"
        lines.append(f"step     about {duration(plan.seconds)}, {speed}; {plan.binds} binds{how}")
        lines += _stages(plan)
    elif 0 < micro < load.micro_tokens:
        lines.append(f"step     none: it does not fit, but with train.tokens_per_micro_batch={micro}")
    else:
        lines.append("step     none: it does not fit; --propose looks for layouts that do")
    total = f"{memory.needed / GIB:.1f} GiB of {memory.memory / GIB:.1f}"
    lines.append(f"memory   {'fits' if memory.fits else 'does not fit'}: {total} on a device, by the {memory.source}")
    lines.append(f"         a rank: {_sizes(memory.trainer)}")
    running = f"{memory.slots:,} completions at once" if memory.slots else "no room for a completion"
    lines.append(f"         an engine's device: {_sizes(memory.engine)}; {running}")
    largest = (
        f"of {micro:,} tokens" if micro else "none: the longest sequence does not fit a rank, or an engine does not"
    )
    lines.append(f"         largest micro-batch {largest}, train.tokens_per_micro_batch is {load.micro_tokens:,}")
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
    lines = [f"         for completions of {mean} tokens on average, the longest of {load.sequences:,} with {most}"]
    for stage in plan.stages:
        parts = sorted(stage.parts.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {_seconds(value)}" for name, value in parts if value > 0.02 * stage.seconds)
        lines.append(f"         {stage.name:<9}{_seconds(stage.seconds):>9}   {said}".rstrip())
    return lines


def text_of_proposals(proposals: Sequence["Proposal"]) -> str:
    """A table of layouts, and the words of the command line that set each."""
    lines = ["layouts  step       tokens/s a device  memory   binds                         layout"]
    for number, proposal in enumerate(proposals, 1):
        plan = proposal.plan
        size = f"{plan.memory.needed / GIB:.0f} GiB"
        figures = f"{_seconds(plan.seconds):<11}{plan.speed:<19,.0f}{size:<9}{plan.binds:<30}"
        lines.append(f"     {number:>2}  {figures}{plan.layout}")
    for number, proposal in enumerate(proposals, 1):
        plan = proposal.plan
        note = "    # trains on completions of the step before" if "runtime.max_lag=1" in proposal.words else ""
        lines.append(f"\n  {number}{note}\n    {' '.join(proposal.words)}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _sizes(sizes: "dict[str, int] | dict[str, float]") -> str:
    return "  ".join(f"{name} {size / GIB:,.2f}" for name, size in sizes.items() if size) + " GiB"
