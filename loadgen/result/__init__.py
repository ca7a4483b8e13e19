"""What a command found, as values that JSON carries."""
