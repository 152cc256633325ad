"""New weights for servers, and the proof that they arrived.

`sync.py` gives a server its weights and verifies them by `probe.py`, whichever way they are sent. The way is a
`WeightTransport` of `transport.py`, which also chooses it. Its kinds, by `TRANSPORTS`: copies in files, `folder.py` and
`adapters.py`; and what reads the trainer's memory, by `stream.py` and `buckets.py`: `group.py` and `ipc.py`.
`to_vllm.py` and `to_sglang.py` are the calls by which a server of that kind takes them.
"""

from proxima.data.kinds import Kinds

TRANSPORTS = Kinds(
    {
        "adapters": "proxima.engine.http.weights.adapters:AdapterTransport",
        "folder": "proxima.engine.http.weights.folder:FolderTransport",
        "group": "proxima.engine.http.weights.group:GroupTransport",
        "ipc": "proxima.engine.http.weights.ipc:IpcTransport",
    }
)
