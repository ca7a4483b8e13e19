"""The step loop, its metrics, and the publisher of what it changes."""
