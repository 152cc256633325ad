"""Plans: the time and memory that a step of a recipe needs on devices that nobody has rented yet.

    devices.toml   accelerators and networks, with sources; the shares of their peaks that a step reaches
    devices        reads them, and parses `128xH800-80G`
    rates          those shares
    layout         ranks, their groups, and engines of a recipe, and whether they divide a model
    step_load      sequences of a step and their lengths
    stage_times    the duration of each stage: a roofline
    traffic        the bytes that ranks send each other
    device_memory  bytes of a device, and the largest micro-batch
    step_plan      a whole step, from a recipe: `plan_recipe`
    proposals      the best layouts for given devices

    plan = plan_recipe(resolve("qwen3_30b_cppo"), read_devices("128xH800-80G"))
    plan.seconds, plan.speed, plan.memory.fits

For a virtual clock, `plan.times` gives the duration of each stage for lengths that the caller passes:

    times.decode_step(running, context)       seconds of a token of each running completion, and the bottleneck
    times.prefill(tokens)                     one engine reads prompts
    times.generate(lengths, prompt, group)    one engine, a list of completions with continuous batching: a `Stage`
    times.forward(lengths), times.update(lengths)   all ranks, sequences of these lengths: a `Stage`
    times.publish()                           new weights to the engines: a `Stage`

and `plan.load.lengths(count)`, `plan.memory.slots`, `plan.layout.engines` are the arguments to pass. `Stage.seconds` is
the time of a stage, and `Stage.binds` the part that takes most of it.

Import rules are those of `lab`. To add a device: a table in `devices.toml`.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import lazy_imports

if TYPE_CHECKING:
    from proxima.lab.plan.devices import Devices, read_devices
    from proxima.lab.plan.layout import DeviceLayout, planned_layout
    from proxima.lab.plan.stage_times import Stage, StageTimes
    from proxima.lab.plan.step_load import StepLoad
    from proxima.lab.plan.step_plan import StepPlan, plan_recipe, plan_step

__getattr__, __dir__ = lazy_imports(__name__)

__all__ = [
    "DeviceLayout",
    "Devices",
    "Stage",
    "StageTimes",
    "StepLoad",
    "StepPlan",
    "plan_recipe",
    "plan_step",
    "planned_layout",
    "read_devices",
]  # fmt: skip
