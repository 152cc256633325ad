"""Servers that proxima starts itself: their environment, command line, supervision and end.

`serve_options.py` is the section `engine.serve`. `server_environment.py` installs a server into an environment of its
own, because its versions of torch and transformers are not those of the trainer. `launch.py` has the command line, as
a user could type it; `server_process.py` is one server, started below `guardian.py`, which ends it with proxima;
`servers.py` starts all of them and restarts what dies; `server_log.py` reads what they write.
Imports: httpx, `proxima.data`. Imported by `engine/http` and `cli`.
To add a server: a function beside `vllm_launch`, a line in `LAUNCHES` there, and what installs it.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import lazy_imports

if TYPE_CHECKING:
    from proxima.engine.serve.launch import LAUNCHES
    from proxima.engine.serve.serve_options import Serve
    from proxima.engine.serve.servers import Report, Servers, check_serve, is_free, start_servers

__getattr__, __dir__ = lazy_imports(__name__)

__all__ = ["LAUNCHES", "Report", "Serve", "Servers", "check_serve", "is_free", "start_servers"]
