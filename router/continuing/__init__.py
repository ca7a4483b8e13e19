"""Get the rest of a broken stream from another pod. Pure: reads events and makes requests, sends nothing."""
