"""What one rank counts, samples and records while it trains."""
