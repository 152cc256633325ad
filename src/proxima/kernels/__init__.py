"""C++ for bf16 on a CPU: what lies between torch's calls, compiled where a compiler is. Without one the same is torch.

compiled   compiles a file once a machine and keeps the library; `vectors.h` is what the files share
step       norms, rotary, attention over the cache and SwiGLU of a decode step
linear     products with a packed weight on the tiles of AMX
sample     one token a row from logits
train      a training pass, forward and backward: `layer.cpp` and `attention.cpp`

Imported by `model` and `engine`, where a model and a machine can use them.
"""
