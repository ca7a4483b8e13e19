"""Sending requests at their times and noting what became of them."""
