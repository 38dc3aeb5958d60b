"""What was measured: profiles, their files, groups of them, and which clocks are worth choosing."""
