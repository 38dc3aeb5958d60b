"""NVML, NVIDIA's management library: `gpu` and `cuda` open GPUs, `device` lists those of the
node.
"""
