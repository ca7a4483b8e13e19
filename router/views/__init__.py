"""What a decision sees: the request, and each pod's cache, queue and speed. Pure."""
