"""Reads a model's answer as text, reasoning and tool calls, piece by piece; one file per format of calls."""
