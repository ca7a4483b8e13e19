"""One request on its way: wait, attempt, retry, hedge, relay, record."""
