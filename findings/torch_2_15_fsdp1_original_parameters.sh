#!/usr/bin/env bash
# torch 2.15.0: a pipeline stage that FullyShardedDataParallel wraps with `use_orig_params=True` can no longer be trained by
# torch.distributed.pipelining; without that option it can.
#
# Behaviour: two gloo ranks, one stage each, Schedule1F1B, 4 microbatches; the last stage is a Linear inside FSDP over one
# rank. With `use_orig_params=False` two steps run. With `use_orig_params=True` the first step raises "Output 0 of View is a
# view and its base or another view of its base has been modified inplace". torch 2.13.0 trains both.
#
# Usage: findings/torch_2_15_fsdp1_original_parameters.sh
#        PYTHON=.venv-newest/bin/python findings/torch_2_15_fsdp1_original_parameters.sh   # has torch 2.15.0 already
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$folder/venv"
    python=$folder/venv/bin/python
    "$python" -m pip install --quiet torch==2.15.0 numpy
fi

cat > "$folder/train.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0]), dist.new_group([1])]
module = nn.Linear(16, 16)
if rank == 1:
    keeps = sys.argv[1] == "original"
    cpu = torch.device("cpu")
    module = FullyShardedDataParallel(module, groups[1], device_id=cpu, use_orig_params=keeps)
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
said = f"torch {torch.__version__}: trained"
try:
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.randn(16, 16))
        else:
            schedule.step(target=torch.randn(16, 16))
except RuntimeError as error:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    said = f"torch {torch.__version__}: {str(cause).split('.')[0]}"
if rank == 1:
    print(said, flush=True)
os._exit(0)
PYTHON

trained() { # what the last rank says, with its parameters "flat" or "original"
    "$python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/train.py" "$1" 2> /dev/null
}

flat=$(trained flat)
original=$(trained original)
echo "use_orig_params=False: $flat"
echo "use_orig_params=True:  $original"
case "$flat" in "torch 2.15.0"*": trained") ;; *) exit 1 ;; esac
case "$original" in *"modified inplace"*) ;; *) exit 1 ;; esac
