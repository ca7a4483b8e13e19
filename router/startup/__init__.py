"""Builds the gateway from its settings, starts it and stops it."""
