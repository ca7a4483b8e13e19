"""Triton kernels: each file has one kernel and the function that launches it."""
