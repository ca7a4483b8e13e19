"""The result of a command, as values that JSON can hold."""
