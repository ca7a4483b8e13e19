"""Emulates a CUDA card on machines without one. The CPU computes, as late as the order of the streams allows."""
