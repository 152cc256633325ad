"""The local engine in a separate process, so that it generates while the trainer computes.

`process_engine.py` is the `Engine`; `supervisor.py` keeps `served_engine.py` running (started by `process.start`),
`channel.py` has the messages between them, and `shared_weights.py` the weights.
"""
