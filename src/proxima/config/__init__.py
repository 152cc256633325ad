"""Config: a recipe and overrides become one checked config in which every value knows its origin.

    sections/         one module per section of a recipe: its fields and its checks
    schema, families  the config of a run, and those of `eval` and `generate`; the table of the ways to train
    recipe_reader     YAML and key=value → layers                tree              layers as nodes; how they merge
    layers            layers and presets → one tree              presets           algorithms by name
    builder           tree → typed dataclasses with provenance   scalars           values, read and written as YAML
    resolution        recipe → Resolved, for any root            problems          error lines, bounds of fields
    resolved          the config, the origin of each value, and both as config.yaml
    describe          a dataclass: fields, kinds, help           other_names       the peers' names for our fields
    validate          the list of all checks                     comparable        the fields that may differ
    batch_arithmetic  sequences, micro-batches, updates of a step    json_schema   for editors; the catalogue of kinds

Imports: pyyaml, torch, every room below, all at first use, because `proxima --help` reads `families`. Imported by
`runtime`, `laws` and the rooms above.
To add a field or a check: see `sections`. To add a way to train on a fixed data set: see `families`. To add a
preset: a key in `presets.py` with its source. A field has no aliases; its former names go into `other_names.py`.
"""
