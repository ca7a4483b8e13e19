"""Measuring a profile: which steps, how long they take, which constants explain that."""
