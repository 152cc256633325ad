"""Data preparation: published question sets become folders for training and evaluation, with every row accounted for.

`prepare` keeps each question once, drops answers that no reward can score and questions of an evaluation set, and
writes a card with counts and hashes. One file per step: `locate` (finds the files), `read_files` (reads them and knows
their columns), `normalize` (canonical questions and answers), `deduplicate`, `decontaminate`, `pipeline` (the split,
the evaluation sets, and all steps in order), `write_files`, `dataset_card` (write the output). `catalog` has the
sources and the user's options.
Imports: stdlib, `data`, `model`, `task`, `reward` of proxima; pyarrow, huggingface_hub and datasets on first use.
Imported by `cli`.
To add a source: (1) an entry in `catalog.yaml`, and its folder in `proxima.task.local_files.PREPARED`; (2) a branch in
`read_row` if its columns have a new form, a kind in `ANSWERS` if its answers do; (3) real rows, valid and broken, in
`tests/prepare`. Stable: `prepare`, `locate_files`, `PrepareOptions`, `SOURCES`, the columns of the tables, the keys
of the card.
"""
