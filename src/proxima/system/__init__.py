"""What the machine gives, for every room: its files, its disk, its processor, and who may ask it.

    atomic_files     a file is whole or absent             full_disk        recognises a full disk
    atomic_folders   the same of a folder
    jsonl            JSON lines that survive a kill        checksum         of files
    text_files       reads what a user names               recipe_files     recipes by name
    damaged_files    one line for a damaged file of a run
    bounded_reading  answers of other processes, up to a limit
    openmp           how long threads spin before they sleep
    machine          its processor, compiler and cache folder
    environment      versions and machine of a run, for `environment.json`
    packages         those that only some recipes need
    secret_values    what may not be written down          web_requests     who may ask an HTTP server of proxima

Imports: the standard library and `data`'s errors. Imported by every room but `data`, `core` and `process`.
To add a helper: a second room needs it, and it knows nothing of either.
"""
