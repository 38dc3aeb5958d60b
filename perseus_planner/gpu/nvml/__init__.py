"""NVIDIA's management library (NVML): which GPU, calls and their errors, what to know of a GPU."""
