#!/usr/bin/env bash
# megatron-core 0.19.2: where CUDA_VISIBLE_DEVICES hides GPUs, the logged energy is that of other GPUs.
#
# Behaviour: each rank of `megatron.core.energy_monitor.EnergyMonitor` (Megatron-LM's `--log-energy`)
# takes the number of its CUDA device, which counts the visible GPUs from 0, and asks NVML for the GPU of
# that number. NVML numbers all GPUs of a node and knows no CUDA_VISIBLE_DEVICES. So a training on the
# GPUs 4 to 7 logs the energy of 0 to 3, and where a launcher shows one GPU to each rank, all ranks log
# that of GPU 0, once for each of them. The sums look plausible, and nothing is said. (Inside a container
# or a cgroup that holds other GPUs back from NVML too, the numbers are the same.) ZeusMonitor maps them.
#
# Seen, with a stand-in for NVML in which GPU 0 uses 100 J and three others 300 J each: "each rank sees
# one GPU: 400 J of 1000 J", "all ranks see all GPUs: 1000 J of 1000 J".
#
# Usage: findings/megatron_energy_monitor_reads_other_gpus.sh; PYTHON=python3 by default; needs no GPU.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip="$work/venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 nvidia-ml-py==13.615.71
# The wheel is for Python 3.12; this module of it is plain Python.
$pip --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 \
    --target "$work/core" megatron-core==0.19.2

"$work/venv/bin/python" -W ignore - "$work/core" <<'PYTHON'
import runpy
import sys
from pathlib import Path
from unittest import mock

import pynvml
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

USED_J = [100, 300, 300, 300]  # of the four GPUs of a node, in one iteration
(wheel,) = Path(sys.argv[1]).glob("megatron_core-*.dist-info")
assert wheel.name == "megatron_core-0.19.2.dist-info", wheel.name
counters_mj = [0] * len(USED_J)  # NVML's energy counters
of_cpu = torch.tensor


def logged_j(device_of_rank):
    """The sum over ranks of the energy of one iteration, given the CUDA device of each rank."""
    monitors = []
    for device in device_of_rank:
        with mock.patch.object(torch.cuda, "current_device", lambda device=device: device):
            monitor = module["EnergyMonitor"]()
            monitor.setup()
        monitor.resume()
        monitors.append(monitor)
    for gpu, used_j in enumerate(USED_J):
        counters_mj[gpu] += 1000 * used_j
    with mock.patch.object(torch, "tensor", lambda values, dtype, device: of_cpu(values, dtype=dtype)):
        return sum(monitor.lap() for monitor in monitors)


dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
with (
    mock.patch.object(pynvml, "nvmlInit", lambda: None),
    mock.patch.object(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index),
    mock.patch.object(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda gpu: counters_mj[gpu]),
):
    module = runpy.run_path(str(Path(sys.argv[1], "megatron/core/energy_monitor.py")))
    one_each = logged_j([0, 0, 0, 0])  # as CUDA numbers them under srun --gpus-per-task=1
    all_seen = logged_j([0, 1, 2, 3])
print(f"each rank sees one GPU: {one_each:g} J of {sum(USED_J)} J")
print(f"all ranks see all GPUs: {all_seen:g} J of {sum(USED_J)} J")
sys.exit(0 if (one_each, all_seen) == (400, 1000) else "the behaviour has changed")
PYTHON
