"""Readers of tool calls and reasoning."""
