"""Tasks: the sources of prompts.

    protocol           a task, its rows, and the base of the kinds that are played
    generated          arithmetic, images of squares, numbered seeds
    local_files        Parquet, JSON Lines, JSON and CSV, and folders of `proxima data prepare`; read by `file_formats`
    hub                Hugging Face data sets, and GSM8K          reasoning_gym, mix    its puzzles; several tasks
    held_out_part, overlaps  the rows that are not trained on; questions that are, although they are evaluated
    column_mapping     columns → a row; with `published_chats` (chats), `template` (texts) and `image_files`
    prompts            rows → prompts: the order, the chat template, the limit of tokens
    example_rows       rows → examples of SFT, preference pairs, labeled completions
    template_traps     warnings about chat templates that change rows silently

A task is a frozen spec; `rows(seed)` opens its data as a finite, random-access list of `Row`s, the same in every
process. `Cursor` orders the rows over epochs and gives each prompt its uid; `PromptSource` applies the chat template
and skips prompts that are too long; `PreferenceReader` turns rows into pairs of completions.
Imports: stdlib, numpy, `proxima.data`, `proxima.model.chat`; pyarrow, datasets and reasoning_gym only when a task that
needs them opens its data. Imported by `rollout`, `evaluation`, `prepare` and the rooms above.
To add one: (1) a file with a frozen dataclass and `rows`; (2) a line in `TASKS`; (3) real rows, valid and broken, in
`tests/task/test_<name>.py`. Out of tree: `{kind: my_pkg.tasks:Riddles}`, or an entry point of `proxima.tasks`.
Stable: `Row`, `Rows`, `Task`, `Cursor`, `PromptSource`.
"""

from proxima.data.kinds import Kinds

TASKS = Kinds(
    {
        "arithmetic": "proxima.task.generated:Arithmetic",
        "shapes": "proxima.task.generated:Shapes",
        "csv": "proxima.task.local_files:Csv",
        "dataset": "proxima.task.hub:Dataset",
        "environment": "proxima.rollout.environment_rows:EnvironmentRows",
        "files": "proxima.task.local_files:Files",
        "gsm8k": "proxima.task.hub:Gsm8kTask",
        "jsonl": "proxima.task.local_files:Jsonl",
        "mix": "proxima.task.mix:Mix",
        "parquet": "proxima.task.local_files:Parquet",
        "prepared": "proxima.task.local_files:PreparedTask",
        "reasoning_gym": "proxima.task.reasoning_gym:ReasoningGymTask",
        "seeds": "proxima.task.generated:Seeds",
    },
    "proxima.tasks",
)

__all__ = ["TASKS"]
