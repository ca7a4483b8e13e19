"""What requests became, as numbers."""
