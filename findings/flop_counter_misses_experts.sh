#!/usr/bin/env bash
# torch 2.13.0 and 2.15.0: FlopCounterMode counts no FLOPs of experts that run by grouped_mm, and none of
# nn.TransformerEncoderLayer once it is in evaluation mode.
#
# Behaviour: torch.utils.flop_counter counts operators that are in its table. `aten._grouped_mm`, which
# torch.nn.functional.grouped_mm calls for all experts of a mixture at once, is not, nor is the fused
# operator that an encoder layer takes without gradients. An operator that is missing counts as 0, without
# a warning. So the same experts, with the same gradients, have FLOPs if they are looped over, and none
# if they are grouped, neither forward nor backward; and the same layer has FLOPs in training mode, and
# none in evaluation mode. Utilization, the balance of stages and the energy of a FLOP, taken from these
# counts, are wrong for such models. A formula can be given by `custom_mapping`.
#
# Seen: "experts in a loop: 1179648, grouped: 0", "layer in training: 205824, in evaluation: 0".
#
# Usage: findings/flop_counter_misses_experts.sh
#        PYTHON=.venv-newest/bin/python findings/flop_counter_misses_experts.sh   # torch 2.15.0
set -eu

python="${PYTHON:-}"
if [ -z "$python" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    python="$folder/venv/bin/python"
    "$python" -m pip install --quiet "torch==2.13.0"
fi

"$python" -W ignore - <<'PYTHON'
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

EXPERTS, TOKENS, WIDTH, HIDDEN = 4, 64, 32, 48  # 16 tokens for each expert


def looped(tokens, up, down):
    parts = zip(tokens.chunk(EXPERTS), up, down)
    return torch.cat([functional.relu(part @ first) @ second for part, first, second in parts])


def grouped(tokens, up, down):
    each = TOKENS // EXPERTS
    ends = torch.arange(each, TOKENS + 1, each, dtype=torch.int32)
    hidden = functional.relu(functional.grouped_mm(tokens, up, offs=ends))
    return functional.grouped_mm(hidden, down, offs=ends)


def trained(experts):
    """FLOPs of a forward and a backward, and the gradients of the weights."""
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        experts(*tensors).square().sum().backward()
    return counter.get_total_flops(), [tensor.grad for tensor in tensors]


def of_layer(training):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True).train(training)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(2, 6, WIDTH))
    return counter.get_total_flops()


assert torch.__version__.startswith(("2.13.0", "2.15.0")), torch.__version__
in_loop, of_loop = trained(looped)
in_groups, of_groups = trained(grouped)
for one, other in zip(of_loop, of_groups):
    torch.testing.assert_close(one, other, rtol=0.02, atol=0.5)
training, evaluation = of_layer(True), of_layer(False)
print(f"experts in a loop: {in_loop}, grouped: {in_groups}")
print(f"layer in training: {training}, in evaluation: {evaluation}")
expected = 3 * 2 * 2 * TOKENS * WIDTH * HIDDEN  # two products, and two for each backward
sys.exit(0 if (in_loop, in_groups) == (expected, 0) and training > evaluation == 0 else "changed")
PYTHON
