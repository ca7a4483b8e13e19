"""Copies of KV blocks between the pool and a slower tier; README.md has the invariants."""
