"""The index of prefixes by pod, and the reader of what engines publish."""
