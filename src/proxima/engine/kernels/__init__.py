"""C++ of the engine on a CPU: what lies between torch's calls, compiled where a compiler is.

`compiled.py` compiles a file once a machine and keeps the library; `step.cpp` with `step.py` has norms, attention and
SwiGLU of a decode step. Each is a drop-in for eager torch, which runs where there is none.
Imports: torch. Imported by the decoders.
"""
