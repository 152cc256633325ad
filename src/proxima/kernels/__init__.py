"""C++ for bf16 on a CPU: the operations between torch's calls, compiled if there is a compiler, else left to torch.

compiled     compiles a file once per machine and keeps the library; `vectors.h` is shared by the files
decode_step  norms, rotary, attention over the cache and SwiGLU; products with a packed weight on the tiles of AMX; one
             token per row from logits: `step.cpp`, `linear.cpp`, `sample.cpp`
train_pass   a training pass, forward and backward: `layer.cpp` and `attention.cpp`
adamw        the optimizer's step, with clipping and norms

Imports: torch, `proxima.data`. Imported by `model`, `engine` and `training`, if the model and the machine can use them.
To add one: (1) a `.cpp` that includes `vectors.h`; (2) a function or class here that documents its arguments, and is
None if `unavailable` gives a reason; (3) tests against torch in float64, and that a row's bits depend on that row
alone.
"""
