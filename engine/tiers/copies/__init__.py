"""Copies of blocks between two tiers: runs, fences, rates, and which fetches pay. Pure."""
