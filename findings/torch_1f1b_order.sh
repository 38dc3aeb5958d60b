#!/usr/bin/env bash
# torch 2.15.0: the public attribute `pipeline_order` of Schedule1F1B is not what the schedule runs
# on its last rank.
#
# Behaviour: with 3 stages and 4 microbatches, the forwards of the last stage are listed as those of
# the microbatches 1 to 4, of which the last does not exist; the schedule runs 0 to 3. The order of
# all other ranks is right. Whoever plans or analyses by this attribute gets one rank wrong.
#
# Seen: "last rank lists 2F1 2F2 2F3 2F4".
#
# Usage: findings/torch_1f1b_order.sh
#        PYTHON=.venv-newest/bin/python findings/torch_1f1b_order.sh   # has torch 2.15.0 already
set -eu

python="${PYTHON:-}"
if [ -z "$python" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    python="$folder/venv/bin/python"
    "$python" -m pip install --quiet "torch==2.15.0"
fi

"$python" - <<'PYTHON'
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

assert torch.__version__.startswith("2.15.0"), torch.__version__
dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
stage = pipelining.PipelineStage(torch.nn.Linear(2, 2), 0, 3, torch.device("cpu"))
schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
rows = {
    rank: [str(each) for each in row if each is not None and each.computation_type.name == "FORWARD"]
    for rank, row in schedule.pipeline_order.items()
}
print("last rank lists", *rows[2])
assert rows[0] == ["0F0", "0F1", "0F2", "0F3"], rows[0]
assert rows[1] == ["1F0", "1F1", "1F2", "1F3"], rows[1]
if rows[2] != ["2F1", "2F2", "2F3", "2F4"]:
    sys.exit("the behaviour has changed")
PYTHON
