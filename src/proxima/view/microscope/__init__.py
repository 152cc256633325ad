"""The microscope, `proxima view`: a run in the browser, from its curves down to why a token was masked.

    server.py        the process: its socket, its address and its key         app.py      access control and routes
    viewed_run.py    a run folder: state, recipe                               notes.py    readers' notes on a run
    trend.py         its curves
    step_file.py     a step's Parquet, by row group, and text search in it
    recomputed_columns.py  columns that were not stored, computed from the weights
    completion_page.py  a completion with its columns, and explained tokens       token_text  ids → text
    metric_meanings.py  metrics.yaml: what each metric means, for the curves and for docs/
    exported_page.py a step in one file, to share; single_file.py: its script  page/       HTML, CSS and JavaScript
    stages.py        the last steps of timeline.json

It only reads the run folder, in a separate process, and writes nothing there, so it can't slow down or harm training.
docs/view.md describes the routes. `explained_tokens.py` and with it torch is imported after the first answers.
    viewer_process.py  the viewer of a run in progress (`view=true`), and in a notebook (`run.view()`)
Imports: starlette, uvicorn, pyarrow; `core`, `experiments`, `runtime.state`. Imported by `api` and `cli`.
"""

PORT = 8123  # the default; reports link to it
