"""One call to one engine, and what its answer means."""
