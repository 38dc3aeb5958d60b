"""The page that shows what the service does, and its files."""
