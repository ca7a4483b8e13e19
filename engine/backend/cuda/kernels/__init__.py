"""Triton kernels: each file one kernel and the function that launches it."""
