"""The answers of `proxima plan` without a simulation, as facts for --json and as text: a plan, and proposals."""

import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from proxima.cli.explanation import trained_block
from proxima.config.outcomes import decided_in
from proxima.config.resolved import Resolved
from proxima.engine.local.decoder import padded_rows
from proxima.view.formatting import count, duration, rate
from proxima.view.terminal import table_text
from proxima_plan.devices import CPU, GIB, MEASURED, Devices
from proxima_plan.engine_settings import ARGUMENTS, CACHE_GIB, GPU_MEMORY
from proxima_plan.forecast import StepPlan, plan_recipe, planned_config
from proxima_plan.layout import DeviceLayout
from proxima_plan.memory import CACHE, COMPUTES, CONTEXT, FRAGMENTED, MARGIN, WEIGHTS, sync_memory, with_rows
from proxima_plan.proposals import proposals, remedies, words_of
from proxima_plan.rehearsal.rehearsal import rehearse_recipe

Answer = tuple[Any, str]


def planned(
    resolved: Resolved[Any], overrides: Sequence[str], devices: Devices, mean: float | None, *, exact: bool
) -> Answer:
    """The plan of the recipe's own layout. `exact`: its memory counted by a rehearsal, with the waits of its host."""
    plan = plan_recipe(resolved, devices, mean=mean)
    waits = dict[str, Any]()
    notes = list[str]()
    if exact:
        ranks = plan.layout.ranks
        code = resolved.import_code
        decided = decided_in(planned_config(resolved.config, devices)[0], resolved.config)
        words = [f"{path}={dtype}" for path, dtype in decided.items()]
        rows = with_rows(plan.recipe.spec, plan.recipe.model, plan.layout, devices.kind).log_prob_chunk
        if rows is not None:
            words.append(f"model.log_prob_chunk={rows}")
        rehearsal = rehearse_recipe(str(resolved.recipe), [*overrides, *words], ranks, import_code=code)
        ratio = sum(plan.memory.trainer.values()) / rehearsal.peak - 1
        counted = f"{rehearsal.peak / GIB:.2f} GiB of a rank, counted in {rehearsal.seconds:.0f} s"
        waited = ", ".join(f"{what} {times}" for what, times in sorted(rehearsal.waits.items()))
        notes.append(f"exact    {counted}; by the formula {ratio:+.0%}")
        notes.append(f"         the host waits for the device: {waited}")
        waits["waits"] = rehearsal.waits
        plan = plan.recipe.plan(plan.layout, counted=rehearsal.peak_bytes)
    notes += [f"note     {note}" for note in plan.recipe.notes]
    steps = getattr(resolved.config.train, "steps", 0) or 0
    if not plan.memory.fits:
        remedy = remedies(resolved, overrides, devices, mean)
        if remedy is not None:
            waits["fits_with"] = remedy[0]
            notes = [*_remedy(*remedy), *notes]
    return plan.as_json() | waits, "\n".join([trained_block(resolved), "", *_lines(plan, steps), *notes])


def proposed(resolved: Resolved[Any], devices: Devices, mean: float | None) -> Answer:
    """A table of layouts, and the words of the command line that set each."""
    facts = []
    rows = []
    below = list[str]()
    for number, plan in enumerate(proposals(resolved, devices, mean), 1):
        words = words_of(plan, resolved)
        title = f"  {number}  {plan.layout}"
        if "runtime.max_lag=1" in words:
            title += "; trains on completions of the step before"
        facts.append({"words": words, **plan.as_json()})
        rows.append(
            {
                "layout": str(number),
                "step": _seconds(plan.seconds),
                "tok/s a device": count(plan.speed),
                "memory": f"{plan.memory.needed / GIB:.0f} GiB",
                "binds": plan.binds,
            }
        )
        below += ["", title, f"     {' '.join(words)}"]
    return facts, "\n".join([trained_block(resolved), "", table_text(rows, sys.stdout, left=("binds",)), *below])


def _lines(plan: StepPlan, steps: int) -> list[str]:
    """The plan of a layout: a line for each stage, then memory and network traffic. `steps`: of the run; 0: unknown."""
    load = plan.load
    memory = plan.memory
    micro = plan.micro_batch
    engine, trainer = plan.sides
    kind = plan.recipe.devices.kind
    lines = [f"layout   {plan.layout}, on {plan.recipe.devices}"]
    if kind.source == MEASURED:
        measured = f"{1000 * kind.bf16:,.0f} GFLOP/s in matrix products, {1000 * kind.bandwidth:,.0f} GB/s of memory"
        lines.append(f"         measured here, for each rank: {measured}")
    idle = plan.recipe.devices.count - plan.layout.devices
    if idle > 0:
        lines.append(f"idle     {idle} of {plan.recipe.devices.count} devices: the layout takes {plan.layout.devices}")
    if memory.fits:
        step = f"step     about {duration(plan.seconds)}, {rate(plan.speed)} a device; {plan.binds} binds"
        if plan.overlaps:
            step += f"; engines and ranks at once, {duration(engine)} and {duration(trainer)}"
        lines.append(step)
        lines += _stages(plan)
        if load.generates and not plan.layout.in_process:
            first = plan.times.first_sync()
            lines.append(f"start    first weights {_seconds(first.seconds)}: {first.how}")
        if steps:
            lines.append(f"run      about {duration(steps * plan.seconds)} for {steps:,} steps, without evaluations")
    elif not memory.starts and (_words_that_start(plan) or not 0 < micro < load.micro_tokens):
        lines += _refusal(plan)
    elif 0 < micro < load.micro_tokens:
        lines.append(f"step     none: it does not fit, but with train.tokens_per_micro_batch={micro}")
    elif _slots_that_fit(plan):
        lines.append(f"step     none: it does not fit, but with engine.slots={_slots_that_fit(plan)}")
    elif load.generates:
        lines.append("step     none: it does not fit; --propose searches for layouts that do")
    else:
        lines.append("step     none: it does not fit; take more devices or larger ones")
    lines += _memory(plan, micro)
    sent: dict[str, float] = {}
    for stage in plan.stages:
        for group, size in stage.sent.items():
            sent[group] = sent.get(group, 0.0) + size
    if sent and memory.fits:
        lines.append(f"network  sent by a rank in each step: {_sizes(sent)}")
    return lines


def _remedy(words: Sequence[str], plan: StepPlan) -> list[str]:
    """The words with which a recipe would fit, and how large and fast it would be."""
    memory = plan.memory
    size = f"{memory.needed / GIB:.1f} GiB of {memory.memory / GIB:.1f}"
    return [f"fits     with {shlex.join(words)}", f"         {size}, about {duration(plan.seconds)} a step"]


def _slots_that_fit(plan: StepPlan) -> int:
    """The most slots of an engine in the process, whose cache has a row for each, with which the plan fits; 0: fewer
    would not do, or there is no such engine."""
    memory = plan.memory
    asked = plan.load.engine.slots
    if not plan.layout.in_process or not asked:
        return 0
    cache = memory.engine[CACHE]
    rows = padded_rows(asked)
    most = (1 - MARGIN) * memory.memory
    fitting = int((most - memory.needed + cache) / (cache / rows)) // 8 * 8
    if 0 < fitting < asked:
        return fitting
    return 0


def _refusal(plan: StepPlan) -> list[str]:
    """Why the servers do not start, with the figures, and the value with which they do."""
    memory = plan.memory
    engine = plan.load.engine
    layout = plan.layout
    total = memory.memory / GIB
    needs = f"{memory.least / GIB:,.1f} GiB"
    if memory.share:
        given = f"{engine.source}={memory.share:g} gives a server {memory.server / GIB:,.1f} GiB of {total:,.1f}"
    else:
        given = f"{CACHE_GIB}={engine.cpu_cache // GIB} gives a server {memory.server / GIB:,.1f} GiB"
    if memory.server < memory.least:
        length = max(engine.max_length, plan.load.prompt + plan.load.longest)
        parts = _sizes({name: memory.engine[name] for name in (WEIGHTS, COMPUTES)})
        why = f"it needs {needs}: {parts}, 1 of the driver, and the cache of a sequence of {length:,} tokens"
    else:
        why = f"{_others(layout)} leave it {memory.room / GIB:,.1f}"
    words = _words_that_start(plan)
    if words:
        return [f"step     none: a server does not start, but would with {words}", f"         {given}; {why}"]
    split = "--propose searches for layouts that do"
    if layout.engine_split < layout.engine_devices:
        split = f"split it over its devices: '{ARGUMENTS}=[--tensor-parallel-size, \"{layout.engine_devices}\"]'"
    none = f"a server needs {needs}, and {_others(layout)} leave it {memory.room / GIB:,.1f}; {split}"
    return [f"step     none: a server does not start: {given}", f"         {none}"]


def _others(layout: DeviceLayout) -> str:
    """What shares a device with a server."""
    others = []
    if layout.colocated:
        others.append("the ranks")
    if layout.stacked > 1:
        others.append("other servers")
    return " and ".join(others) or "driver and kernels"


def _words_that_start(plan: StepPlan) -> str:
    """The words of the command line with which the servers start; empty if they do with none."""
    memory = plan.memory
    engine = plan.load.engine
    if not memory.share:
        gib = engine.cpu_cache / GIB + max(0.0, memory.least - memory.server) / GIB
        if memory.least < memory.room and memory.server < memory.least:
            return f"{CACHE_GIB}={math.ceil(gib)}"
        return ""
    share = memory.best_share
    if not share:
        return ""
    if not engine.source.startswith("engine."):
        return f"{engine.source} {share:g} on its command line"
    if engine.source != GPU_MEMORY:
        return f"{GPU_MEMORY}={share:g}, without --gpu-memory-utilization in {ARGUMENTS}"
    return f"{GPU_MEMORY}={share:g}"


def _stages(plan: StepPlan) -> list[str]:
    load = plan.load
    mean = f"{load.mean:,.0f}"
    most = f"{load.largest(load.sequences):,}"
    what = "completions" if load.generates else "examples"
    lines = [f"         for {what} of {mean} tokens on average, the longest of {load.sequences:,} with {most}"]
    for stage in plan.stages:
        parts = sorted(stage.parts.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {_seconds(value)}" for name, value in parts if value > 0.02 * stage.seconds)
        lines.append(f"         {stage.name:<9}{_seconds(stage.seconds):>9}   {said}".rstrip())
        lines += [f"{'':<30}{line}" for line in textwrap.wrap(stage.how, 68)]
    return lines


def _memory(plan: StepPlan, micro: int) -> list[str]:
    memory = plan.memory
    total = f"{memory.needed / GIB:.1f} GiB of {memory.memory / GIB:.1f}"
    cpu = plan.recipe.devices.kind.name == CPU
    fits = "fits" if memory.fits else "does not fit"
    where = "for each rank" if cpu else "on a device"
    lines = [f"memory   {fits}: {total} {where}, by the {memory.source}"]
    lines.append(f"         a rank: {_sizes(memory.trainer)}")
    if memory.engine:
        running = "no room for the longest completion"
        if memory.slots:
            running = f"{memory.slots:,} completions at once"
        where = "the engine" if plan.layout.in_process else "a server"
        lines.append(f"         {where}: {_sizes(memory.engine)}; {running}")
        if memory.share:
            of = f"{memory.server / GIB:,.1f} GiB of a device, {plan.load.engine.source}={memory.share:g}"
            lines.append(f"         a server takes {of}, and needs {memory.least / GIB:,.1f} to start")
    if memory.host:
        lines.append(f"         in host memory, of each rank: {memory.host / GIB:,.2f} GiB")
    if plan.load.generates and not plan.layout.in_process:
        recipe = plan.recipe
        first = sync_memory(recipe.spec, recipe.model, plan.layout, first=True)
        later = sync_memory(recipe.spec, recipe.model, plan.layout, first=False)
        lines.append(f"         a rank sends weights with {later / GIB:,.2f} GiB, the first with {first / GIB:,.2f}")
    host = plan.host_memory
    lines.append(f"         host of rank 0: {sum(host.values()) / GIB:,.0f} GiB: {_sizes(host)}")
    if plan.load.beside:
        lines.append(f"         reward models: {plan.load.beside / GIB:,.2f} GiB")
    context = "Python and torch" if cpu else "driver and kernels"
    lines.append(f"         and {CONTEXT / GIB:.0f} GiB of {context}, {FRAGMENTED:.0%} of a rank for fragments")
    largest = f"of {micro:,} tokens"
    if not micro:
        largest = "none: the longest sequence does not fit a rank, or an engine does not"
    lines.append(f"         largest micro-batch {largest}; it has {plan.load.micro_tokens:,}")
    return lines


def _seconds(value: float) -> str:
    if value >= 10:
        return f"{value:,.0f} s"
    if value >= 0.1:
        return f"{value:.2g} s"
    return duration(value)


def _sizes(sizes: dict[str, int] | dict[str, float]) -> str:
    return "  ".join(f"{name} {size / GIB:,.2f}" for name, size in sizes.items() if size) + " GiB"
