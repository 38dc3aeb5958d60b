#!/usr/bin/env bash
# lowtime 0.3.0 (PyPI): whether the whole frontier is found depends on the unit of energy.
#
# Behaviour: `PhillipsDessouky.run()` takes the number 10,000 for an infinite capacity. Where a step of
# one unit of time costs more than that, the walk ends, as it does at the least time; neither an
# exception nor a warning tells the two apart. Two operations of 1 to 4 s, one after the other, whose
# costs fall by 40, 20 and 10 J a second: in joules the walk comes to 2 s, in millijoules, which NVML
# counts in, it ends before its first step. A remark in the source names the limit; the documentation
# does not. A cut through many GPUs, or costs of a whole tensor group, come to it in joules too.
#
# Seen: "joules: 7 6 5 4 3 2", "millijoules: none".
#
# Ends with 0 while this is so, and with 1 once it has changed.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" -q --disable-pip-version-check install lowtime==0.3.0 scipy
"$work/venv/bin/python" - <<'PROGRAM' | tee "$work/seen"
import networkx
from lowtime.cost_model import CostModel
from lowtime.operation import (
    CandidateExecutionOptions,
    DummyOperation,
    ExecutionOption,
    Operation,
    OperationSpec,
)
from lowtime.solver import PhillipsDessouky

COSTS_J = {1: 100, 2: 60, 3: 40, 4: 30}


class Measured(CostModel):
    def __init__(self, of_joule):
        self.of_joule = of_joule

    def __call__(self, quant_time):
        return COSTS_J[quant_time] * self.of_joule


for unit, of_joule in (("joules", 1.0), ("millijoules", 1000.0)):
    options = [
        ExecutionOption(real_time=float(time_s), unit_time=1.0, cost=cost * of_joule, knob=time_s)
        for time_s, cost in COSTS_J.items()
    ]
    graph = networkx.DiGraph(source_node=0, sink_node=3)
    graph.add_node(0, op=DummyOperation())
    graph.add_node(3, op=DummyOperation())
    for node in (1, 2):
        spec = OperationSpec(CandidateExecutionOptions(list(options)), Measured(of_joule))
        graph.add_node(node, op=Operation(spec))
    networkx.add_path(graph, range(4))
    times = [str(step.quant_time) for step in PhillipsDessouky(graph).run()]
    print(f"{unit}: {' '.join(times) or 'none'}")
PROGRAM
grep -qx "joules: 7 6 5 4 3 2" "$work/seen" && grep -qx "millijoules: none" "$work/seen"
