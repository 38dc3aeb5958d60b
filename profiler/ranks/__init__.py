"""The ranks of a job, which measure all its stages at once."""
