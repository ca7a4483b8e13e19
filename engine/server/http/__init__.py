"""What a server needs whatever it serves: bodies with deadlines, API keys, traces."""
