"""Results of published evaluations of cache-aware routing, measured again on the simulated fleet."""
