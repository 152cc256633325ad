"""Servers that proxima starts itself: their environment, command line, supervision and shutdown.

`launch.py` is the section `engine.serve`, and the command line that follows from it, as a user could type it.
`servers.py` starts all servers, each under `process.guardian`, which stops it when proxima exits; restarts those that
die; and reads their logs. `server_environment.py` installs a server into a dedicated environment, because it needs
other versions of torch and transformers than the trainer.
Imports: httpx, `proxima.data`. Imported by `engine/http` and `cli`.
To add a server: a function next to `vllm_launch`, a line in `LAUNCHES` there, and an installer.
"""
