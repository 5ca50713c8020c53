"""CUDA C++ sources of ddl, as package data; see ddl.kernels.nvrtc for how they are found."""
