"""What clients store at the gateway: named caches, and which pod has which conversation."""
