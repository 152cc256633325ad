"""Servers that proxima starts itself: their environment, command line, supervision and shutdown.

`serve_options.py` is the section `engine.serve`. `server_environment.py` installs a server into a dedicated
environment, because it needs other versions of torch and transformers than the trainer. `launch.py` has the command
line, as a user could type it; `server_process.py` is one server, started under `process.guardian`, which stops it when
proxima exits; `servers.py` starts all servers and restarts those that die; `server_log.py` reads their logs.
Imports: httpx, `proxima.data`. Imported by `engine/http` and `cli`.
To add a server: a function next to `vllm_launch`, a line in `LAUNCHES` there, and an installer.
"""
