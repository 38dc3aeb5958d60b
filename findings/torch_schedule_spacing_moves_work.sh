#!/usr/bin/env bash
# torch 2.13.0 and 2.15.0: the spaced schedule of torch's own visualizer gives computations of one rank to another.
#
# Behaviour: `get_schedule_ops(..., add_spacing=True)` puts gaps where a rank waits, so that bubbles can
# be seen and counted. Once a rank has nothing left to run, the ranks after it are numbered one lower,
# and the rest of their work is written into their neighbours' rows. In most orders the last rank ends
# first, and none comes after it. In ZBVZeroBubble with more microbatches than ranks, the first rank
# ends first, and every row is wrong. Nothing is said. Without spacing the order is right; with it,
# Interleaved1F1B, InterleavedZeroBubble, LoopedBFS and DualPipeV are right too. Whoever takes busy and
# waiting times of ranks from the spaced rows gets them wrong.
#
# Seen with 4 ranks and 8 microbatches: "1W7 runs on rank 1, and stands on rank 0", "computations of
# each rank: 48 48 48 48 and spaced: 51 49 47 45".
#
# Usage: findings/torch_schedule_spacing_moves_work.sh
#        PYTHON=.venv-newest/bin/python findings/torch_schedule_spacing_moves_work.sh   # torch 2.15.0
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
import contextlib
import io
import sys

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

RANKS = 4
MICROBATCHES = 8
RIGHT = ["DualPipeV", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"]


def rows(schedule, spaced):
    with contextlib.redirect_stdout(io.StringIO()):  # it prints each step
        found = get_schedule_ops(schedule, RANKS, MICROBATCHES, add_spacing=spaced)
    return [[action for action in row if action is not None] for row in found]


assert torch.__version__.startswith(("2.13.0", "2.15.0")), torch.__version__
order = rows("ZBVZeroBubble", spaced=False)
spaced = rows("ZBVZeroBubble", spaced=True)
rank_of = {action: rank for rank, row in enumerate(order) for action in row}
moved = [
    (str(action), rank_of[action], rank)
    for rank, row in enumerate(spaced)
    for action in row
    if rank_of[action] != rank
]
wrong_rows = [rank for rank in range(RANKS) if order[rank] != spaced[rank]]
print(f"ZBVZeroBubble: rows {wrong_rows} differ; {len(moved)} of {len(rank_of)} computations moved")
for name, here, there in moved[:4]:
    print(f"  {name} runs on rank {here}, and stands on rank {there}")
print("  computations of each rank:", *map(len, order), "and spaced:", *map(len, spaced))
for schedule in RIGHT:
    same = rows(schedule, spaced=False) == rows(schedule, spaced=True)
    print(f"{schedule}: {'the same' if same else 'differs'}")
    if not same:
        sys.exit("the behaviour has changed")
if wrong_rows != list(range(RANKS)) or len(moved) != 6 or len(rank_of) != 192:
    sys.exit("the behaviour has changed")
PYTHON
