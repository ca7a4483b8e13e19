"""Slower tiers below the KV pool: what they keep, what is fetched from them, and when neither is worth it."""
