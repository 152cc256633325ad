"""Config: a recipe and overrides become one checked config in which every value knows its origin.

    sections/         a section of a recipe each: its fields and its checks
    schema, families  the sections together: a run, what `proxima eval` reads; every command that trains, a line each
    recipe_reader     YAML and key=value → layers                tree              layers as nodes; how they merge
    layers            layers and presets → one tree              presets           algorithms by name
    laid_over         `@FILE`, a recipe over another             mixtures          a check that models with experts need
    builder           tree → dataclasses with provenance         coerce, scalars   written value → annotated type
    resolution        recipe → Resolved, for any root            problems          the user's line, did-you-mean
    resolved          the config, and where each value is from
    describe, slots   a dataclass: fields, kinds, help           other_names       what the peers call our fields
    validate          the list of all checks                     comparable        which fields may differ
    estimate          batch, memory, time of a recipe            explanation       the rest of what `explain` shows
    step_size, model_size, memory_size                           what the estimate adds up
    json_schema       for editors                                yaml_dump         config.yaml of a run

Imports: pyyaml, torch, every room below, all at the first use, because `proxima --help` reads `families`. Imported by
`runtime`, `check` and the rooms above.
To add a field or a check: see `sections`. To add a command that trains on a fixed data set: see `families`. To add a
preset: a key in `presets.py` with its source. A field has no aliases; a name that it had goes into `other_names.py`.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import lazy_imports

if TYPE_CHECKING:
    from proxima.config.problems import ConfigError
    from proxima.config.resolution import resolve
    from proxima.config.resolved import Resolved
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.config.validate import check, load_recipe
    from proxima.config.yaml_dump import dump

__getattr__, __dir__ = lazy_imports(__name__)

__all__ = ["ConfigError", "EvaluateConfig", "Resolved", "RunConfig", "check", "dump", "load_recipe", "resolve"]
