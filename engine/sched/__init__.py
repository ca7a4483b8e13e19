"""Continuous batching: pure, no torch, no clock, no I/O."""
