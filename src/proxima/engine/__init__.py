"""Engines: prompts go in, completions with log-probs and versions come out. One protocol, one file an engine.

`protocol.py` is what an engine is; `local.py` is the one in this process: a scheduler (continuous batching, a group's
prompt run once) over a decoder (`fast_decoder.py` for Llama, Qwen2 and Qwen3 shapes, `general_decoder.py` for any
Hugging Face decoder), with `sampler.py` and `cache.py`.
Imports: torch, `proxima.data`, `proxima.model`. Imported by `runtime`, `cli`.
To add an engine: (1) a file with a frozen spec of its settings and `build(policy, seed)`; (2) a line in `ENGINES`; (3)
the conformance tests in `tests/engine` find it in the dict: log-probs equal to the trainer's forward, versions, pause,
abort.
Stable: `Engine`, `Sampling`, `Request`, `Health`. Private: decoders and cache.
"""

from proxima.engine.local import Local, LocalEngine
from proxima.engine.protocol import Engine, Health, Request, Sampling

ENGINES: dict[str, type] = {"local": Local}

__all__ = ["ENGINES", "Engine", "Health", "Local", "LocalEngine", "Request", "Sampling"]
