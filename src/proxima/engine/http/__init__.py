"""Engines that are servers: token ids go to a server over HTTP; token ids with log-probs and versions come back.

`dialect.py` has what differs between servers, `vllm.py` and `sglang.py` implement it. The rest does not know which
server it talks to: `client.py` (one address, deadlines, the peer's name in every error), `replica.py` (one server and
its running requests), `replica_states.py` (the table of its states and transitions), `version_proof.py` (which weights
it has), `replica_pool.py` (which replica gets a request), `replica_keeper.py` (health checks, return to service, new
weights), `device_sharing.py` (sleep and wake, taking turns with the trainer), `engine.py` (the `Engine` over them),
`folder_sync.py` (how new weights get there) and `weight_probe.py` (checks that a server computes with them).
Imports: torch, httpx, `proxima.data`, `proxima.model`, `engine/serve` and single modules of `engine`. Imported by
`engine/__init__`, `runtime`, `check`, `cli`.
To add a server: a file with a class that has the methods of `Dialect`, and a spec next to it that derives from
`ServerSpec`; the tests in `tests/engine/http` run against a fake of its protocol.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import lazy_imports

if TYPE_CHECKING:
    from proxima.engine.http.client import Address, ServerClient, ServerError
    from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, ServerHealth, TokenRequest, WeightHandover
    from proxima.engine.http.engine import HttpEngine
    from proxima.engine.http.folder_sync import FolderSync, SyncReport
    from proxima.engine.http.generation_job import CompletionRules
    from proxima.engine.http.server_spec import ServerSpec
    from proxima.engine.http.vllm import Vllm, VllmDialect

__getattr__, __dir__ = lazy_imports(__name__)

__all__ = [
    "Address",
    "Chunk",
    "CompletionRules",
    "Dialect",
    "FolderSync",
    "HttpEngine",
    "ServerClient",
    "ServerError",
    "ServerFacts",
    "ServerHealth",
    "ServerSpec",
    "SyncReport",
    "TokenRequest",
    "Vllm",
    "VllmDialect",
    "WeightHandover",
]
