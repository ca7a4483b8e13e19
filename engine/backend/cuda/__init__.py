"""The engine on an NVIDIA GPU: own Triton kernels, CUDA graphs, overlapped steps."""
