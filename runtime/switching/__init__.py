"""All ranks take up a new plan at the same iteration."""
