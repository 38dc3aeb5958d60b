"""What a training engine and its torch modules look like from outside, for the profiler and the runtime alike."""
