"""Tasks: the sources of prompts. One file per kind: generators, files, Hugging Face data sets, GSM8K, reasoning_gym.

A task is a frozen spec; `rows(seed)` opens its data as a finite, random-access list of `Row`s, the same in every
process. `Cursor` orders the rows over epochs and gives each prompt its uid; `PromptSource` applies the chat template
and skips prompts that are too long; `PreferenceReader` turns rows into pairs of completions.
Imports: stdlib, numpy, `proxima.data`, `proxima.model.chat`; pyarrow, datasets and reasoning_gym only when a task that
needs them opens its data. Imported by `rollout`, `evaluate`, `prepare` and the rooms above.
To add one: (1) a file with a frozen dataclass and `rows`; (2) a line in `TASKS`; (3) real rows, valid and broken, in
`tests/task/test_<name>.py`. Out of tree: `{kind: my_pkg.tasks:Riddles}`. Stable: `Row`, `Rows`, `Task`, `Cursor`,
`PromptSource`.
"""

from proxima.data.kinds import Kinds

TASKS = Kinds(
    {
        "arithmetic": "proxima.task.arithmetic:Arithmetic",
        "shapes": "proxima.task.shapes:Shapes",
        "csv": "proxima.task.local_files:Csv",
        "dataset": "proxima.task.hub:Dataset",
        "files": "proxima.task.local_files:Files",
        "gsm8k": "proxima.task.gsm8k:Gsm8kTask",
        "jsonl": "proxima.task.local_files:Jsonl",
        "mix": "proxima.task.mix:Mix",
        "parquet": "proxima.task.local_files:Parquet",
        "prepared": "proxima.task.prepared:PreparedTask",
        "reasoning_gym": "proxima.task.reasoning_gym:ReasoningGymTask",
        "seeds": "proxima.task.seeds:Seeds",
    }
)

__all__ = ["TASKS"]
