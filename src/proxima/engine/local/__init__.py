"""The engine in this process: continuous batching on its own copy of the weights.

`local_engine.py` is the `Engine`. `scheduler.py` fills the slots (a group's prompt runs once, finished slots are
refilled) and keeps the running completions in `token_table.py` and their keys and values in `kv_cache.py`.
`decoders.py` chooses the decoder: `fast_decoder.py` for Llama, Qwen2 and Qwen3 shapes, `general_decoder.py` for any
Hugging Face decoder; both derive from `decoder.py`. `sampler.py` draws tokens, with the C++ of `proxima.kernels` where
it applies. Private: everything but `local_engine.py`.
"""
