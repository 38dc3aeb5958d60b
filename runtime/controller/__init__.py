"""The process of each node that sets the clocks of all its GPUs."""
