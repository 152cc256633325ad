"""Engines: prompts in, completions with log-probs and versions out. One protocol, one file an engine.

`protocol.py` defines an engine, `choice.py` is one before it is built, `requirements.py` checks whether an engine
outside this process meets a run's requirements.
`local.py` is the one in this process: a scheduler (`scheduler.py`: continuous batching, a group's prompt run once;
`token_table.py`: the columns of the running completions) over a decoder (`fast_decoder.py` for Llama, Qwen2 and Qwen3
shapes, `general_decoder.py` for any Hugging Face decoder; `decoder_proof.py` proves them), with `sampler.py`,
`truncation.py`, `cache.py` and the C++ of `proxima.kernels`, or without it `block_sampler.py`. `local_process.py` is
the same engine in a separate process: `supervisor.py` keeps `served_engine.py` running (started by `process.start`),
`channel.py` has the messages between them, and `shared_weights.py` the weights. `http/` has the engines that are
servers, and `serve/` starts the servers. `event_loop_thread.py` has the event loop of an engine outside this process.
`executor.py` calls `pause_hooks.py` around the pauses of any engine; `sleeping_engine.py` has the additional methods of
an engine on shared devices.
Imports: torch, `proxima.data`, `proxima.kernels`, `proxima.model`, `proxima.process`. Imported by `rollout` and the
rooms above.
To add an engine: (1) a file with a frozen spec that derives from `EngineSpec` and has `build(setup)`; (2) a line in
`ENGINES`; (3) the conformance tests in `tests/engine` find it in the dict: log-probs equal to the trainer's forward,
versions, pause, abort.
Stable: everything exported here. Private: scheduler, decoders and cache.
"""

from proxima.data.kinds import Kinds

ENGINES = Kinds(
    {
        "local": "proxima.engine.local.engine:Local",
        "local_process": "proxima.engine.process.engine:LocalProcess",
        "vllm": "proxima.engine.http.vllm:Vllm",
        "sglang": "proxima.engine.http.sglang:Sglang",
    }
)

__all__ = ["ENGINES"]
