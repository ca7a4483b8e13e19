"""Sends requests at their times and records the outcome of each."""
