"""C++ of the engine on a CPU: what lies between torch's calls, compiled where a compiler is.

`compiled.py` compiles a file, once a machine, and keeps the library. `step.cpp` with `step.py` has norms, attention and
SwiGLU of a decode step, `sample.cpp` the draw of a token, `linear.cpp` products on AMX; `vectors.h` what they share.
Each takes the place of eager torch, which runs where there is none.
Imports: torch. Imported by the decoders and the sampler, when they have use for it.
To add a kernel: a C++ file, the Python file that says what its arguments are, and a test against eager torch.
Private: all of it.
"""
