#!/usr/bin/env bash
# nvidia-ml-py 13.615.71 (PyPI), any Python 3. No GPU and no driver is needed.
#
# The binding has the clocks event reasons 0x200 (board limit) and 0x400 (reliability) only under the
# older prefix, nvmlClocksThrottleReason. Under the newer one, nvmlClocksEventReason, there is neither,
# and nvmlClocksEventReasonAll (0x1ff) lacks both bits, while nvmlClocksThrottleReasonAll (0x7ff) has
# them. A program that takes all bits
# of nvmlDeviceGetCurrentClocksEventReasons that are outside nvmlClocksEventReasonAll for nonsense, or
# a GPU without a bit of it for one that nothing slows down, is wrong on drivers that set them.
#
# Ends with 0 while this is so, and with 1 once it has changed.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install nvidia-ml-py==13.615.71
"$folder/venv/bin/python" - <<'PROGRAM'
import pynvml

print(f"nvmlClocksEventReasonAll     {pynvml.nvmlClocksEventReasonAll:#x}")
print(f"nvmlClocksThrottleReasonAll  {pynvml.nvmlClocksThrottleReasonAll:#x}")
for name, bit in (("BoardLimit", 0x200), ("Reliability", 0x400)):
    older = getattr(pynvml, f"nvmlClocksThrottleReason{name}", None)
    newer = getattr(pynvml, f"nvmlClocksEventReason{name}", None)
    print(f"{name}: nvmlClocksThrottleReason {older}, nvmlClocksEventReason {newer}")
    if older != bit or newer is not None or pynvml.nvmlClocksEventReasonAll & bit:
        raise SystemExit("changed")
PROGRAM
