"""Find the stages that a training engine holds on this rank, while it runs an iteration.

Each adapter is a context manager in which the iteration runs. It yields a function that, called
afterwards, returns the stages that the iteration ran, as `EngineStages`. An engine is imported only
where it is used.
"""
