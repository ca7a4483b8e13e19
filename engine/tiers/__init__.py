"""Slower tiers below the KV pool: what is kept there, what is fetched from there, and when neither is worth it."""
