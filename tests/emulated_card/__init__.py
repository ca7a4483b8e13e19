"""Emulates a CUDA card for machines without one: the CPU computes for `torch.cuda`, as late as streams may run."""
