#!/usr/bin/env bash
# zeus 0.16.0 (PyPI, extra `pfo-server`): its pipeline frequency controller lifts the power limit of
# the GPU that it is given, and does not put it back.
#
# Behaviour: the process of `FrequencyController` first resets the power limit to the board's default
# and locks the memory clock and the SM clock at their highest; at its end it resets both locks. A cap
# that an operator has set before (`nvidia-smi -pl`) is gone from then on, and nothing says so. The
# calls are recorded by a stand-in for the GPUs; no GPU is needed. The extra `pfo`, meant for
# trainings, does not install aiofiles, without which its modules cannot be imported.
#
# Seen: "reset_power_management_limit(0)" as the first call that changes something, and no call of
# set_power_management_limit before or after it.
#
# Ends with 0 while this is so, and with 1 once it has changed. Downloads torch.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" -q --disable-pip-version-check install "zeus[pfo-server]==0.16.0" fastapi==0.125.0 pydantic==1.10.27 torch
cd "$work"
venv/bin/python - <<'PROGRAM' | tee seen
from unittest import mock

from zeus.optimizer.pipeline_frequency import frequency_controller

gpus = mock.Mock()
gpus.get_supported_memory_clocks.return_value = [1593]
gpus.get_supported_graphics_clocks.return_value = [1410, 1200]


class Clocks:  # what the training asks for: one clock, then the end
    asked = [1200, None]

    def get(self, block):
        return self.asked.pop(0)


controller = frequency_controller.FrequencyController.__new__(frequency_controller.FrequencyController)
controller._q = Clocks()
with mock.patch.object(frequency_controller, "get_gpus", return_value=gpus):
    controller._controller_process(0)
for name, values, _ in gpus.mock_calls:
    if not name.startswith("get_"):
        print(f"{name}({', '.join(map(str, values))})")
PROGRAM
test "$(head -1 seen)" = "reset_power_management_limit(0)"
if grep -q '^set_power_management_limit' seen; then exit 1; fi
