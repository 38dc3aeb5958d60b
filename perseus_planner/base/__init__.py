"""What all rooms stand on: errors, numbers with units, strict files, other processes."""

__version__ = "0.4.0.dev0"
