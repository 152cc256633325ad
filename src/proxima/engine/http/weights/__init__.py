"""New weights for servers, and the proof that they arrived.

`sync.py` gives a server its weights and verifies them by `probe.py`, whichever way they are sent. The way is a
`WeightTransport` of `transport.py`, which also chooses it: `folder.py`, `adapters.py`, and by `buckets.py` `group.py`
and `ipc.py`. `to_vllm.py` and `to_sglang.py` are the calls by which a server of that kind takes them.
"""
