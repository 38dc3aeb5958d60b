"""From what was decided to plans: frontiers looked up, or solved and planned by other processes."""
