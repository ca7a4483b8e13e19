"""What published evaluations of cache-aware routing report, measured again on the simulated fleet."""
