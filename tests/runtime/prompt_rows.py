"""Rows of the journal's table of prompts."""

from types import SimpleNamespace


def prompt_rows(journal, where="", *values):
    """One object for each row, by uid."""
    cursor = journal._db.execute(f"SELECT * FROM prompts {where} ORDER BY uid", values)
    names = [name for name, *_ in cursor.description]
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in cursor]


def prompt_row(journal, uid):
    (row,) = prompt_rows(journal, "WHERE uid = ?", uid)
    return row


def consumed_prompts(journal, step):
    """The prompts that a finished step consumed; the dropped ones have a `reason`."""
    return prompt_rows(journal, "WHERE state = 'consumed' AND step = ?", step)
