"""C++ of a bf16 training pass on a CPU, between its matrix products.

compiler       compiles a source once a machine, and keeps it on disk
train_kernels  the functions, with their shapes and dtypes; `layer.cpp` and `attention.cpp` are what they call

Imported by `model` alone, where a pass can use them.
"""
