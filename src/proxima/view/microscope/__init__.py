"""The microscope, `proxima view`: a run in the browser, from its curves down to why a token was masked.

    server.py        the process: its socket, its address and its key         app.py      who may ask, and the routes
    viewed_run.py    a run folder: curves, state, what its recipe says         notes.py    what readers write beside it
    step_file.py     a step's Parquet, by row group                            search.py   text in it, in bounded time
    recomputed_columns.py  what was not stored, by the weights
    completion_page.py  a completion with its columns, and a token in words       token_text  ids → text
    exported_page.py one file to send to somebody                              page/       HTML, CSS and JavaScript

It reads the run folder alone, in a process of its own, and writes nothing there: it can't slow or harm a training.
docs/view.md has the routes. What is not needed before a completion is opened, torch first, is imported then.
    viewer_process.py  beside a run (`view=true`), and in a notebook (`run.view()`)
Imports: starlette, uvicorn, pyarrow; `core`, `lab`, `runtime.state`. Imported by `api` and `cli`.
"""

PORT = 8123  # where nothing else is asked for; reports link to it
