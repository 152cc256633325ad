"""Config: a recipe and overrides become one checked `RunConfig` in which every value knows where it came from.

    schema.py      the fields, once: default, unit, bounds
    read.py, tree.py   YAML and key=value → layers → one tree
    presets.py     algorithms by name                                 coerce.py
    written values → annotated types
    resolve.py     tree → RunConfig with provenance                   describe.py        what a dataclass says of itself
    check.py       what no single field can see                       errors.py          the user's line, did-you-mean
    explain.py     values, batch arithmetic, memory, time             estimate.py        the numbers behind it
    json_schema.py for editors                                        dump.py            config.yaml of a run folder
Imports: pyyaml, torch, every room below; the tables of kinds are imported when a recipe is resolved. Imported by
`runtime`, `view`, `cli`.
To add a field: a line in `schema.py` with a meaning in `Annotated` and a bound in `__post_init__`; two recipes must
need it, else it belongs into the spec that uses it. To add a preset: a key in `presets.py` with its source. No aliases
for renamed fields.
"""

from proxima.config.builder import ResolvedValue
from proxima.config.dump import dump
from proxima.config.problems import ConfigError, Problem
from proxima.config.resolve import Resolved, resolve
from proxima.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    EvaluateConfig,
    ModelConfig,
    RunConfig,
    RuntimeConfig,
    TrainConfig,
)
from proxima.config.validate import check, load

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "EvaluateConfig",
    "ModelConfig",
    "Problem",
    "Resolved",
    "ResolvedValue",
    "RunConfig",
    "RuntimeConfig",
    "TrainConfig",
    "check",
    "dump",
    "load",
    "resolve",
]
