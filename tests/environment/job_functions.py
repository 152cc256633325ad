"""Functions that `test_job_processes` has played."""

import time


async def played(row):
    """Answer with the length of a text, after the loop was kept busy for `busy` seconds, or the whole interpreter by
    `additions`; or with a
    mapping whose only name has `answers` letters."""
    time.sleep(row.get("busy", 0.0))
    sum(range(row.get("additions", 0)))
    if "answers" in row:  # many roles
        return {"x" * row["answers"]: 1.0}
    return float(len(row.get("text", "")))
