"""The simulated GPU: its physics, its catalogue, what disturbs it, and the fit of the physics to measurements."""
