"""Config: a recipe and overrides become one checked config in which every value knows its origin.

    schema            the fields, once: default, unit, bounds      describe            a dataclass: fields, kinds, help
    algorithm_schema  its `algorithm` section              slots               fields that hold a spec
    recipe_reader     YAML and key=value → layers                  tree                layers as nodes; how they merge
    layers            layers and presets → one tree                presets             algorithms by name
    builder           tree → dataclasses with provenance           coerce, scalars     written value → annotated type
    resolve           recipe → Resolved, for any root              problems            the user's line, did-you-mean
    other_names        what the peers call our fields
    validate          checks across fields: *_checks               comparable          which fields may differ
    estimate          batch, memory, time; recipe_estimates        json_schema, dump   for editors; config.yaml of a run

Imports: pyyaml, torch, every room below; the tables of kinds are imported when a recipe is resolved. Imported by
`runtime`, `view`, `cli`.
To add a field: a line in `schema.py` with a meaning in `Annotated` and a bound in `__post_init__`, if two recipes need
it; else it belongs in the spec that uses it. To add a preset: a key in `presets.py` with its source. A field has no
aliases; a name that it had goes into `other_names.py`.
"""

from typing import TYPE_CHECKING

from proxima.config.dump import dump
from proxima.config.resolve import Resolved, resolve
from proxima.data.kinds import lazy_imports

if TYPE_CHECKING:
    from proxima.config.problems import ConfigError
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.config.validate import check, load_recipe

__getattr__, __dir__ = lazy_imports(__name__)

__all__ = ["ConfigError", "EvaluateConfig", "Resolved", "RunConfig", "check", "dump", "load_recipe", "resolve"]
