"""The tiers below the pool."""
