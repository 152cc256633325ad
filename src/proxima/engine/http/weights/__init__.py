"""New weights for servers, and the proof that they arrived.

`sync.py` gives a server its weights and verifies them by `probe.py`, whichever way they are sent. The way is a
`WeightTransport` of `transport.py`, which also chooses it. Its kinds, by `TRANSPORTS`: copies in files,
`weight_folders.py` and `adapters.py`; and what reads the trainer's memory, by `stream.py` and `buckets.py`:
`process_group.py` and `ipc.py`. `to_vllm.py` and `to_sglang.py` have the calls by which a server takes them.
"""

from proxima.data.kinds import Kinds

TRANSPORTS = Kinds(
    {
        "adapters": "proxima.engine.http.weights.adapters:AdapterTransport",
        "folder": "proxima.engine.http.weights.weight_folders:FolderTransport",
        "group": "proxima.engine.http.weights.process_group:GroupTransport",
        "ipc": "proxima.engine.http.weights.ipc:IpcTransport",
    }
)
