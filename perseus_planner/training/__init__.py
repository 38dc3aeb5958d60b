"""Training engines and torch modules, for the profiler and the runtime: engine kinds,
microbatches, FLOPs and bytes.
"""
