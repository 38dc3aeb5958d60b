#!/usr/bin/env bash
# DeepSpeed 0.19.8 (torch 2.13.0): the default partition of a pipeline makes stages alike, and by that
# the largest stage larger than it need be.
#
# Behaviour: `PipelineModule` cuts its layers by `partition_method="parameters"` unless told otherwise.
# `partition_balanced` says that it solves the linear partition problem, whose aim is the least largest
# part, and up to 0.11.1 it found that. Now it looks for the least difference of the largest and the
# smallest part, and takes a larger largest part where the smallest one grows more. But the largest stage
# sets the pace of a pipeline. ResNet-101 on 6 stages gets one of 10.5 M parameters, where a cut with at
# most 8.9 M exists: 17 % more. Stacks of equal layers are cut well; models of unlike layers (a vision tower
# before a language model, convolutions) often are not.
#
# Seen: "DeepSpeed's stages: 7.4 6.7 6.7 6.7 10.5 6.5 M, largest 10.50 M; best cut: largest 8.94 M".
#
# Usage: findings/deepspeed_parts_of_least_spread.sh
#        PYTHON=.venv/bin/python findings/deepspeed_parts_of_least_spread.sh   # has both already
set -eu

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$folder/venv"
    python="$folder/venv/bin/python"
    "$python" -m pip install --quiet "torch==2.13.0" setuptools wheel
    DS_BUILD_OPS=0 "$python" -m pip install --quiet --no-build-isolation "deepspeed==0.19.8"
fi

cat > "$folder/parts.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

STAGES = 6


class Bottleneck(nn.ModuleList):
    """The weights of one block of ResNet-101."""

    def __init__(self, channels, width):
        shapes = [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
        if channels != 4 * width:
            shapes.append((channels, 4 * width, 1))
        super().__init__(nn.Conv2d(*shape, bias=False) for shape in shapes)
        self.extend(nn.BatchNorm2d(out) for _, out, _ in shapes)


def resnet_101():
    layers = [LayerSpec(nn.Conv2d, 3, 64, 7, bias=False)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for _ in range(blocks):
            layers.append(LayerSpec(Bottleneck, channels, width))
            channels = 4 * width
    return [*layers, LayerSpec(nn.Linear, channels, 1000)]


def least_largest_part(sizes, parts):
    """Try each size of the largest part: with at most that, how few parts do?"""

    def needed(most):
        count, size = 1, 0
        for each in sizes:
            count, size = (count, size + each) if size + each <= most else (count + 1, each)
        return count

    sums = {sum(sizes[begin:end]) for end in range(len(sizes) + 1) for begin in range(end)}
    return min(most for most in sums if most >= max(sizes) and needed(most) <= parts)


assert deepspeed.__version__ == "0.19.8", deepspeed.__version__
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
dist.init_process_group("fake", rank=0, world_size=STAGES, store=FakeStore())
deepspeed.init_distributed("gloo", verbose=False)
layers = resnet_101()
sizes = [sum(weight.numel() for weight in layer.build().parameters()) for layer in layers]
parts = PipelineModule(layers=layers, num_stages=STAGES).parts
stages = [sum(sizes[begin:end]) for begin, end in zip(parts, parts[1:])]
best = least_largest_part(sizes, STAGES)
each = " ".join(f"{size / 1e6:.1f}" for size in stages)
print(
    f"RESULT DeepSpeed's stages: {each} M, largest {max(stages) / 1e6:.2f} M;"
    f" best cut: largest {best / 1e6:.2f} M"
)
sys.exit(0 if max(stages) > 1.15 * best else "the behaviour has changed")
PYTHON

DS_ACCELERATOR=cpu LOCAL_RANK=0 OMP_NUM_THREADS=1 "$python" -W ignore "$folder/parts.py" \
    > "$folder/out" 2> "$folder/err" || {
    cat "$folder/out" "$folder/err" >&2
    exit 1
}
sed -n 's/^RESULT //p' "$folder/out"
