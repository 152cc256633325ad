"""Unit tests and calls of the tool `python`, with the sandbox and without."""
