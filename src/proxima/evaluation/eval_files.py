"""The names of the files of a run's evaluations: `evals/000012-after.parquet`, and of a further held-out set
`evals/000012-after-NAME.parquet`."""

from pathlib import Path


def eval_file_name(step: int, label: str) -> str:
    """The name for the completions of an evaluation; `label` is `before`, `step` or `after`, with `-NAME` of a further
    set."""
    return f"{step:06d}-{label}.parquet"


def eval_files_in(folder: Path) -> list[Path]:
    """The files of evaluations in a folder, in the order of the steps; files with other names are left out."""
    files = [file for file in folder.glob("[0-9]*-*.parquet") if file.stem.partition("-")[0].isdecimal()]
    return sorted(files, key=lambda file: (step_of(file), file.stem))


def step_of(file: Path) -> int:
    """The step of an evaluation."""
    return int(file.stem.partition("-")[0])


def set_of(file: Path) -> str:
    """The further held-out set of a file; empty: it is of `eval.task`."""
    return "".join(file.stem.split("-", 2)[2:])
