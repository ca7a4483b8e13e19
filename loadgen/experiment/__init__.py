"""Arms against each other: blocks, isolation, intervals, verdict."""
