"""Copies of KV blocks between the pool and a slower tier; see README.md."""
