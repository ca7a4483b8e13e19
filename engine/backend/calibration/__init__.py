"""Measures a profile: chooses steps, times them, and fits the constants."""
