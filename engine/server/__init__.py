"""The engine's HTTP surface: validation, the OpenAI routes, streaming."""
