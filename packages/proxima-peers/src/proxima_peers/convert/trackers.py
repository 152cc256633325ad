"""`monitor`: the trackers that a peer's file enables, with the fields that ours have too.

A file that does not mention trackers gives none, even if some version of the peer logs to all that are installed.
"""

from collections.abc import Collection, Mapping

from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Names, Options

TRL: dict[str, Names] = {
    "wandb": {
        "project": ("wandb_project",),
        "entity": ("wandb_entity",),
        "name": ("run_name",),
        "group": ("wandb_run_group",),
    },
    "trackio": {"project": ("project",), "name": ("run_name",), "space_id": ("trackio_space_id",)},
    "mlflow": {"name": ("run_name",)},
    "tensorboard": {"folder": ("logging_dir",)},
}
OLDER = {"tracking": "wandb"}  # verl's first name for it
NAMED: Names = {"project": ("trainer.project_name",), "name": ("trainer.experiment_name",)}
VERL: dict[str, Names] = {"wandb": NAMED, "trackio": NAMED, "mlflow": NAMED, "tensorboard": {}}
RUN: Names = {"project": ("trainer.project_name",), "name": ("trainer.run_name",)}
SKYRL: dict[str, Names] = {"wandb": {**RUN, "tags": ("trainer.tags",)}, "mlflow": RUN, "tensorboard": {}}
UNIRL: Names = {
    "project": ("logging.project_name",),
    "entity": ("logging.entity",),
    "name": ("logging.run_name",),
    "tags": ("logging.tags",),
    "mode": ("logging.wandb_mode",),
}
OF_PRIME_RL = ("monitors.wandb", "wandb", "orchestrator.wandb", "trainer.wandb")  # the others up to August 2026
PRIME_RL: Names = {
    name: tuple(f"{section}.{name}" for section in OF_PRIME_RL)
    for name in ("project", "entity", "name", "group", "tags")
}
AREAL: dict[str, tuple[str, ...]] = {
    "wandb": ("project", "entity", "name", "group", "tags", "mode"),
    "trackio": ("project", "name", "space_id"),
}
AREAL_NAMES = {"project": "experiment_name", "name": "trial_name"}  # fallbacks for fields that are not set


def trl(d: Draft, o: Options) -> None:
    """`report_to`, a name or a list; transformers takes W&B's project from the environment, open-r1 from an option."""
    _listed(d, o, "report_to", TRL, off=("none",))


def verl(d: Draft, o: Options) -> None:
    """`trainer.logger`, a list."""
    _listed(d, o, "trainer.logger", VERL, off=("console", "file"))


def skyrl(d: Draft, o: Options) -> None:
    """`trainer.logger`, a name or a list."""
    _listed(d, o, "trainer.logger", SKYRL, off=("console",))


def unirl(d: Draft, o: Options) -> None:
    """`logging.report_to_wandb`, and its mode."""
    switch = "logging.report_to_wandb"
    if not o.flag(switch):
        return
    if o.flat.get("logging.wandb_mode") == "disabled":
        d.drops(switch, "logging.wandb_mode is disabled")
    else:
        _tracker(d, o, "wandb", switch, UNIRL)


def prime_rl(d: Draft, o: Options) -> None:
    """`[monitors.wandb]`, before it `[wandb]`, a section that is on where it is written."""
    for section in OF_PRIME_RL:
        if any(f"{name}.".startswith(f"{section}.") for name in o.flat):
            for options in PRIME_RL.values():
                o.given(*options)
            _tracker(d, o, "wandb", section, PRIME_RL)
            return


def areal(d: Draft, o: Options) -> None:
    """`stats_logger`: each tracker has a mode, disabled by default; TensorBoard is enabled by its path."""
    prefix = "stats_logger."
    for kind, fields in AREAL.items():
        mode = f"{prefix}{kind}.mode"
        if o.get(mode, default="disabled") == "disabled":
            d.drops_given(o, "no tracker", mode)
            continue
        names: dict[str, tuple[str, ...]] = {field: (f"{prefix}{kind}.{field}",) for field in fields}
        for field, other in AREAL_NAMES.items():
            names[field] += (prefix + other, other)
        _tracker(d, o, kind, mode, names)
    path = prefix + "tensorboard.path"
    if o.given(path):
        _tracker(d, o, "tensorboard", path, {"folder": (path,)})


def _listed(d: Draft, o: Options, switch: str, trackers: Mapping[str, Names], off: Collection[str]) -> None:
    """The trackers in a list or a single name. `off`: words for no tracker, or for output that a run writes anyway."""
    written = o.get(switch, default=[])
    if not isinstance(written, list):
        written = [written]
    words = [OLDER.get(str(word), str(word)) for word in written]
    for word in dict.fromkeys(words):
        if word in trackers:
            _tracker(d, o, word, switch, trackers[word])
        elif word in off:
            d.drops(switch, f"{word}: no tracker; a run prints its numbers and keeps them in metrics.jsonl")
        elif word == "all":
            d.needs("monitor", f"{switch}: all, every tracker that is installed there; name those that you want")
        else:
            d.lacks(switch, f"{word}: no such tracker here; there are {', '.join(trackers)}")


def _tracker(d: Draft, o: Options, kind: str, switch: str, names: Names) -> None:
    """Add a tracker with the fields that the file sets."""
    fields: Fields = {}
    for field, options in names.items():
        name = next((option for option in options if o.flat.get(option) is not None), None)
        if name is None:
            continue
        value = o.get(name)
        why = o.doubts.pop(name, None)
        if why is not None:  # a name decides no result: nothing to fill in
            d.drops(name, f"{why}; our default is used")
        elif field == "tags":
            tags = value if isinstance(value, list) else [value]
            fields[field] = ([str(tag) for tag in tags], f"from {name}")
        else:
            fields[field] = (str(value), f"from {name}")
    d.append("monitor", kind, f"from {switch}", **fields)
