"""From a point of the frontier to a plan: one measured clock per computation, and a switch budget."""
