"""What the three programs share besides the contract: settings, files, logs, signals, Redis, HTTP, traces."""
