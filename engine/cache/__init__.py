"""Prefix cache over token blocks: pure, no torch, no clock, no I/O."""
