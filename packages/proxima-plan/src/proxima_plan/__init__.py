"""Forecasts: the time and memory that a step of a recipe needs, here or on devices that nobody has rented yet.

    cli            `proxima plan`                answers     a plan and proposals, as facts and as text
    devices        accelerators, networks and rates (`devices.toml`), and this machine, measured
    model_size     sizes of models, counted or published (`model_size.toml`)
    layout         ranks, their groups, and engines of a recipe, and whether they divide a model
    engine_settings  share, groups, dtypes and limits of an engine, from its fields and its servers' arguments
    step_load      sequences of a step and their lengths
    stage_times    the one model of time, a roofline: the duration of each stage     traffic   bytes that ranks send
    memory         the one model of memory, in closed form: weights, gradients, optimizer, activations, KV cache
    host_memory    the memory of a host: processes, offloaded states, sleeping servers, a step's completions
    balance        what the slowest share of an update computes, by the run's own dealing
    forecast       a whole step, from a recipe: `plan_recipe`
    proposals      the best layouts for given devices
    rehearsal/     the exact memory: whole steps on a fake device
    simulation/    the run's own loop on a virtual clock, with the times of a plan: many lags, many numbers of devices

    plan = plan_recipe(resolve("qwen3_30b_cppo"), read_devices("128xH800-80G")[0])
    plan.seconds, plan.speed, plan.memory.fits

Imports: every room of proxima. proxima does not import it, but finds the command through its entry point.
To add a device: a table in `devices.toml`. To add a model: a table in `model_size.toml`.
"""

__version__ = "0.1.0"
