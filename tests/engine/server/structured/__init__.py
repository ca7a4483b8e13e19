"""Answers that follow a constraint, from the request to the client."""
