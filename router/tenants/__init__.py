"""Tenants: who asks, which models they may use, and how much of them."""
