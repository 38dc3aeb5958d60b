"""Who sets a GPU: written down first, and reset whoever dies."""
