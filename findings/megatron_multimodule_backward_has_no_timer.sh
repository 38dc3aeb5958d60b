#!/usr/bin/env bash
# megatron-core 0.19.2: backwards of a pipeline of several modules start no timer.
#
# `schedules.backward_step` starts and stops `config.timers("backward-compute")` around a backward,
# as it did in every version since 0.9. `backward_step_multimodule`, which a schedule takes instead
# where it is given a MultiModulePipelineCommunicator, computes its gradients without. Timing logs of
# such a training have forwards, and no backwards. Needs python3.12; downloads torch (some GB).
set -eu
PYTHON=${PYTHON:-python3.12}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --only-binary=:all: torch==2.15.0 megatron-core==0.19.2

"$work/venv/bin/python" -W ignore - <<'PYTHON'
from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel import schedules

started = []


class Timer:
    def __init__(self, name):
        self.name = name

    def start(self):
        started.append(self.name)

    def stop(self):
        pass


config = SimpleNamespace(
    timers=lambda name, log_level=0: Timer(name),
    grad_scale_func=None,
    deallocate_pipeline_outputs=False,
)


def activation():
    return torch.ones(2, requires_grad=True)


received = activation()
schedules.backward_step(received, received.sum(), None, config)
one_module = list(started)
assert received.grad is not None

started.clear()
received = activation()
schedules.backward_step_multimodule({"llm": received}, received.sum(), None, config, "llm")
assert received.grad is not None

print("timers of backward_step:", one_module)
print("timers of backward_step_multimodule:", started)
assert one_module == ["backward-compute"]
assert started == []
PYTHON
