"""Engines: prompts in, completions with log-probs and versions out. One protocol, one file per engine.

`protocol.py` defines an engine; `engine_selection.py` describes one before it is built; `variations.py` is one with a
setting changed. `local/` is the engine in this process, `process/` the same engine in a separate process, `http/` has
the engines that are servers, and `serve/` starts the servers. `event_loop_thread.py` has the event loop of an engine
outside this process. `executor.py` calls hooks when any engine pauses or resumes.
Imports: torch, `proxima.data`, `proxima.kernels`, `proxima.model`, `proxima.process`. Imported by `rollout` and the
rooms above.
To add an engine: (1) a file with a frozen spec that derives from `EngineSpec` and has `build(setup)`; (2) a line in
`ENGINES`; (3) the conformance tests in `tests/engine` find it in the dict: log-probs equal to the trainer's forward,
versions, pause, abort.
Stable: `protocol.py` and the specs. Private: `local/`, except its engine.
"""

from proxima.data.kinds import Kinds

ENGINES = Kinds(
    {
        "local": "proxima.engine.local.local_engine:Local",
        "local_process": "proxima.engine.process.process_engine:LocalProcess",
        "vllm": "proxima.engine.http.vllm:Vllm",
        "sglang": "proxima.engine.http.sglang:Sglang",
    }
)

__all__ = ["ENGINES"]
