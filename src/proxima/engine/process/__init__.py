"""The local engine in a separate process, so that it generates while the trainer computes.

`process_engine.py` is the `Engine`, with the supervisor that keeps `served_engine.py` running (started by
`process.children`); that one also has the messages between them. `shared_weights.py` has the weights.
"""
