"""Plans: one clock per computation, their files, and the replay of an iteration under one."""
