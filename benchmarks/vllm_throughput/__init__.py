"""Claim: through the engine, a vLLM server reaches at least .9 times the tokens per second of its own benchmark."""
