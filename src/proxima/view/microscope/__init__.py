"""The microscope, `proxima view`: a run in the browser, from its curves down to why a token was masked.

    server.py        the process: its socket, its address and its key
    app.py           access control and routes; readers' notes, held-out answers
    viewed_run.py    a run folder: state, recipe, ids → text
    trend.py         its curves, with metrics.yaml (what each metric means, also for docs/), and the last steps of its
                     timeline
    step_file.py     a step's Parquet, by row group, and text search in it
    completion_page.py  a completion with its columns, stored or computed from the weights, and explained tokens
    exported_page.py a step in one file, to share; single_file.py: its script and images
    page/            HTML, CSS and JavaScript
    viewer_process.py  the viewer of a run in progress (`view=true`), and in a notebook (`run.view()`)

It only reads the run folder, in a separate process, and writes nothing there, so it can't slow down or harm training.
docs/view.md describes the routes.
Imports: starlette, uvicorn, pyarrow; `core`, `experiments`, `runtime.state`. Imported by `api` and `cli`.
"""

PORT = 8123  # the default; reports link to it
