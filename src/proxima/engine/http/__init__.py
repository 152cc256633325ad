"""Engines that are servers: token ids go to a server over HTTP; token ids with log-probs and versions come back.

`dialect.py` has what differs between servers; `vllm.py` and `sglang.py` implement it for the newest two minor versions
of each, and find out what a server can do; `detect.py` finds out which of them a server is. The rest does not know
which server it talks to: `client.py` (one address, deadlines, the peer's name in every error), `replica.py` (one server
and its running requests), `replica_state.py` (whether it is given work), `version_proof.py` (which weights it has),
`replica_pool.py` with `router.py` (which replica gets a request), `replica_keeper.py` (health checks, return to
service, new weights), `generation_job.py` (a partial completion), `engine.py` (the `Engine` over them). `weights` sends
new weights and proves that they arrived. `server_settings.py` has the fields that specs share, `server_file.py` the
file by which servers join and leave, `server_checks.py` the checks before a run, `model_sizes.py` the sizes that tell
models apart, `answer_values.py` and
`answer_checks.py` those of each answer.
Imports: torch, httpx, `proxima.data`, `proxima.model`, `engine/serve` and single modules of `engine`. Imported by
`engine/__init__`, `runtime`, `laws`, `cli`.
To add a server: a file with a class that has the methods of `Dialect`, and a spec next to it that derives from
`ServerSpec`; the tests in `tests/engine/http` run against a fake of its protocol.
"""
