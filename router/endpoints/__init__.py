"""What each path does, from a request's bytes to its record."""
