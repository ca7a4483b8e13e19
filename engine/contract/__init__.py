"""What engine, gateway and load generator must agree on. No torch, and nothing else of `engine`."""
