"""The engine's OpenAI-compatible HTTP surface."""
