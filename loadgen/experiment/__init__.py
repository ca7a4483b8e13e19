"""Comparison of arms: blocks, isolation, intervals, verdict."""
