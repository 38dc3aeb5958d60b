"""A job on a whole cluster, replayed with stragglers: ours beside what other planners would choose."""
