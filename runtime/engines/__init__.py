"""The training engines that a plan is run with: what each runs, and where it says so."""
