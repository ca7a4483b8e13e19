"""Tool calls and reasoning, from clients to templates and back."""
