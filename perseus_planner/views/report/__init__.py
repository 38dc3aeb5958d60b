"""`planner report`: one self-contained page of a profile, a frontier, plans and runs; its figures as plain values."""
