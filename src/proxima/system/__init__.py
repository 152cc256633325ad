"""What the machine gives, for every room: its files, its disk, its processor, and who may ask it.

    atomic_files     files and folders that are complete or absent
    jsonl            JSON lines that survive a kill        full_disk        recognises a full disk
    damage           one line for a damaged file of a run; checksums
    user_files       recipes by name, and the text of a file that a user names
    user_modules     modules that a recipe names, and packages that only some recipes need
    bounded_reading  answers of other processes, up to a limit
    foreign_folder   folders that somebody else has made, within bounds
    openmp           how long threads spin before they sleep
    device_memory    what torch has used of a GPU          out_of_memory    recognises memory that has run out
    machine          processor, compiler, cache folder; versions and machine of a run, for `environment.json`
    secret_values    what may not be written down          web_requests     who may ask an HTTP server of proxima
    http_clients     all clients of HTTP servers           proxies          never asked for this machine
    listening        a socket that listens
    bounded_server   uvicorn with bounds on its connections, and a reader of bodies with bounds

Imports: the standard library and `data`'s errors; `http_clients` httpx, `bounded_server` uvicorn and starlette.
Imported by every room but `data`, `core` and `process`.
To add a helper: a second room needs it, and it knows nothing of either.
"""
