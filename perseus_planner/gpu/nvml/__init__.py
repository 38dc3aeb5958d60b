"""NVML, NVIDIA's management library: `gpu` and `cuda` open GPUs, `discovery` lists those of the
node.
"""
