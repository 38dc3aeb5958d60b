"""Plans while training runs: all ranks agree on a new plan and take it at the same iteration."""
