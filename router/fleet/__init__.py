"""The pods behind the gateway: where they are, whether they answer, and what was sent to them."""
