"""Arms that test an idea or leave a part out: evidence for what the router does, and for what it does not."""
