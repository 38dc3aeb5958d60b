#!/usr/bin/env bash
# DeepSpeed 0.19.8 (torch 2.13.0): a pipeline in float32 with a stage whose weights are all frozen
# fails at its first optimizer step, with the default settings.
#
# Behaviour: `gradient_clipping` is 1.0 unless a config sets it. `clip_grad_norm_` keeps the
# parameters that have gradients, and then takes the device of the first of them; a rank of which
# no weight trains, as where the base of adapters or a vision tower is a stage of its own, has none.
# The other ranks fail in the next collective. With `gradient_clipping: 0.0` the same pipeline
# trains.
#
# Seen: "default: IndexError: list index out of range", "gradient_clipping 0.0: trains".
#
# Usage: findings/deepspeed_clipping_without_gradients.sh
#        PYTHON=.venv/bin/python findings/deepspeed_clipping_without_gradients.sh   # has both already
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

cat > "$folder/train.py" <<'PYTHON'
import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule


class Frozen(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).requires_grad_()  # DeepSpeed wants this of each stage


assert deepspeed.__version__ == "0.19.8", deepspeed.__version__
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.init_distributed("gloo", verbose=False)
base, head = Frozen(4, 4), torch.nn.Linear(4, 4)
base.requires_grad_(False)
model = PipelineModule(
    layers=[base, head],
    num_stages=2,
    loss_fn=torch.nn.functional.mse_loss,
    partition_method="uniform",
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 2**31,
}
if sys.argv[1:] and sys.argv[1].startswith("gradient_clipping"):
    config["gradient_clipping"] = 0.0
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=config
)


def batches():
    while True:
        yield torch.ones(2, 4), torch.ones(2, 4)


try:
    engine.train_batch(batches())
except IndexError as error:
    print("RESULT IndexError:", error, flush=True)
    sys.exit(1)
if engine.is_first_stage():
    print("RESULT trains", flush=True)
PYTHON

result_of() {
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone \
        --nproc_per_node=2 "$folder/train.py" "$@" 2> /dev/null | sed -n 's/^RESULT //p' || true
}

clipped="$(result_of)"
unclipped="$(result_of gradient_clipping)"
echo "default: $clipped"
echo "gradient_clipping 0.0: $unclipped"
[ "$clipped" = "IndexError: list index out of range" ] && [ "$unclipped" = "trains" ] || {
    echo "the behaviour has changed" >&2
    exit 1
}
