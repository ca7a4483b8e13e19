"""The decision rules that other routers published, with their defaults and the data they really have, but not their
code."""
