"""Opens the data of tasks together: their errors are reported together, and both parts of a split share their data."""

from collections.abc import Mapping

from proxima.data import FieldError, FieldErrors, UserError, within
from proxima.data.errors import raise_together
from proxima.task.held_out_part import SplitTask
from proxima.task.protocol import Rows, Task, unusable_rows


def open_tasks(tasks: Mapping[str, Task], seed: int, *, may_skip: bool = False) -> dict[str, Rows]:
    """Open the rows of tasks, keyed by their dotted paths in a recipe.

    Args:
        may_skip: the caller reads each row, and handles those that raise `EmptyPromptError`.

    Raises:
        FieldError, FieldErrors: invalid fields of the tasks, all reported together.
        UserError: see `Task.rows`; also if a row is known to have no prompt, unless `may_skip`.
    """
    rows: dict[str, Rows] = {}
    errors: list[FieldError] = []
    split: list[tuple[SplitTask, Rows]] = []
    for path, task in tasks.items():
        try:
            with within(path):
                rows[path] = _opened(task, seed, split)
        except FieldError as error:
            errors.append(error)
        except FieldErrors as several:
            errors += several.errors
    raise_together(errors)
    if may_skip:
        return rows
    for path, opened in rows.items():
        for row_error in unusable_rows(opened):
            raise UserError(f"{path}: a row has an empty {row_error.field}", remedy=row_error.remedy)
    return rows


def _opened(task: Task, seed: int, split: list[tuple[SplitTask, Rows]]) -> Rows:
    """The rows of a task. `split` has all rows of the tasks that were split before: their data are read once."""
    if not isinstance(task, SplitTask) or task.held_out is None:
        return task.rows(seed)

    everything = next((rows for other, rows in split if task.shares_data(other)), None)
    if everything is None:
        everything = task.all_rows(seed)
        split.append((task, everything))
    return task.of_part(everything)
