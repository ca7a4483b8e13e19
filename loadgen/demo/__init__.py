"""The whole system on one machine: Redis, engines and gateway as child processes, compared and reported."""
