"""What one rank counts, records and detects while it trains."""
