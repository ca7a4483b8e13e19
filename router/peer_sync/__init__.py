"""What gateways tell each other through Redis: requests at pods that publish nothing, and learnt values."""
