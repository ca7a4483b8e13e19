"""Who asks, what they may ask for, and how much of it."""
