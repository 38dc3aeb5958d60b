#!/usr/bin/env bash
# zeus 0.16.0 (PyPI): the energy that `PowerMonitor` computes is wrong wherever power is steady; of a
# window in which it does not change, it is 0 J.
#
# Behaviour: the processes that poll power keep a reading only if it differs from the one before.
# `get_energy` joins the kept readings inside of the window by straight lines. So a step from 100 W to
# 300 W becomes a ramp over all the time at 100 W; what follows the last change is not counted; and a
# window with fewer than two changes has no energy at all. Nothing warns. A stage of a pipeline that
# waits and computes gives such steps. `ZeusMonitor` reports this energy for GPUs without an energy
# counter. Here the power is that of a stand-in for a GPU, read every 50 ms; one whose last digit moves
# at each reading is integrated rightly.
#
# Seen, of 1 s at 100 W and then 300 W: "steady: 202 J of 400 J; 1 s at 300 W: 0 J of 300 J" and
# "last digit moves: 394 J of 400 J; 1 s at 300 W: 288 J of 300 J".
#
# Ends with 0 while this is so, and with 1 once it has changed.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip -q --disable-pip-version-check install zeus==0.16.0
fi

"$python" - <<'PROGRAM'
import queue
import threading
import time
from unittest import mock

from zeus.monitor import power

STEADY_S = 1.0
PERIOD_S = 0.05


class Gpus:
    """One GPU, at 100 W for a second, and then at 300 W."""

    def __init__(self, step_mw):
        self.begin_s = time.time()
        self.step_mw = step_mw
        self.readings = 0

    def __len__(self):
        return 1

    def get_instant_power_usage(self, index):
        self.readings += 1
        watts = 100 if time.time() - self.begin_s < STEADY_S else 300
        return 1000 * watts + self.step_mw * (self.readings % 2)

    get_average_power_usage = get_instant_power_usage
    get_average_memory_power_usage = get_instant_power_usage


class Threads:
    """In place of processes, which would not see the stand-in."""

    Queue = queue.Queue
    Event = threading.Event

    class Process(threading.Thread):
        def __init__(self, target, kwargs, daemon, name):
            super().__init__(target=target, kwargs=kwargs, daemon=daemon, name=name)


def energies_j(step_mw):
    """What `get_energy` says of both seconds, and of one second at 300 W."""
    gpus = Gpus(step_mw)
    change_s = gpus.begin_s + STEADY_S
    with (
        mock.patch.object(power, "get_gpus", lambda ensure_homogeneous=False: gpus),
        mock.patch.object(power.mp, "get_context", lambda method: Threads),
    ):
        monitor = power.PowerMonitor([0], update_period=PERIOD_S, power_domains=["device_instant"])
        time.sleep(change_s + STEADY_S + 4 * PERIOD_S - time.time())
        monitor.stop_events[power.PowerDomain.DEVICE_INSTANT].set()
    both_j = monitor.get_energy(gpus.begin_s, change_s + STEADY_S)[0]
    one_j = monitor.get_energy(change_s + 2 * PERIOD_S, change_s + STEADY_S + 2 * PERIOD_S)[0]
    return both_j, one_j


changed = False
for name, step_mw, least_j, most_j in (("steady", 0, 150, 250), ("last digit moves", 1, 340, 460)):
    both_j, one_j = energies_j(step_mw)
    print(f"{name}: {both_j:.0f} J of 400 J; 1 s at 300 W: {one_j:.0f} J of 300 J")
    changed |= not least_j < both_j < most_j
    changed |= one_j != 0 if step_mw == 0 else not 240 < one_j < 360
raise SystemExit("the behaviour has changed" if changed else 0)
PROGRAM
