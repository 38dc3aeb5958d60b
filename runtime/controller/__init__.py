"""The clock controller: a process on each node that sets the clocks of all its GPUs. Ranks use
`client` alone.
"""
