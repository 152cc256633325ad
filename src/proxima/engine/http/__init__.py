"""Engines that are servers: token ids to a server over HTTP, token ids with log-probs and versions back.

`dialect.py` says what differs between servers, `vllm.py` and `sglang.py` are the two that are known. The rest does not
know which server it talks to: `client.py` (one address, deadlines, the peer's name in every error), `replica.py` (one
server and what runs on it), `pool.py` (which replica gets a request; a sick one is ejected and comes back), `engine.py`
(the `Engine` over them), `weight_folder.py` and `weight_probe.py` (how new weights get there, and the proof that they
did).
Imports: torch, httpx, `proxima.data`, `proxima.model`, `proxima.engine.protocol`. Imported by `engine/__init__`, `cli`.
To add a server: a file with a class that has the methods of `Dialect`, and a spec beside it; the tests of
`tests/engine/http` run over a fake of its protocol.
"""
