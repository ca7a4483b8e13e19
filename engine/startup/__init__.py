"""Builds the engine from its settings, starts it and stops it."""
