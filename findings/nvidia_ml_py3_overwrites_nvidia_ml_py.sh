#!/usr/bin/env bash
# nvidia-ml-py3 7.352.0 over nvidia-ml-py 13.615.71 (PyPI), pip 23.2 and later, any Python 3.
#
# Both packages install a file of one name, pynvml.py. Tutorials name nvidia-ml-py3, whose only
# release is of 2017. Seen:
# 1. pip installs it over nvidia-ml-py without a word; `import pynvml` is then the module of 2017,
#    which has no nvmlDeviceGetTotalEnergyConsumption and no nvmlDeviceSetGpuLockedClocks.
# 2. `pip check` finds no fault.
# 3. `pip uninstall nvidia-ml-py3` removes pynvml.py; pip still lists nvidia-ml-py, `pip check`
#    finds no fault, `import pynvml` fails, and `pip install nvidia-ml-py` does nothing.
# 4. `pip install --force-reinstall nvidia-ml-py` brings the module back.
#
# Ends with 0 while this is so, and with 1 once any of it has changed.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
has() { "$python" -c "import pynvml; raise SystemExit(not hasattr(pynvml, '$1'))" 2>/dev/null; }
changed() { echo "changed: $1"; exit 1; }

pip install nvidia-ml-py==13.615.71
has nvmlDeviceSetGpuLockedClocks || changed "nvidia-ml-py 13.615.71 has no locked clocks"

pip install nvidia-ml-py3==7.352.0
has nvmlDeviceGetPowerUsage || changed "nvidia-ml-py3 no longer installs pynvml.py"
if has nvmlDeviceSetGpuLockedClocks; then changed "nvidia-ml-py3 no longer overwrites the module"; fi
if has nvmlDeviceGetTotalEnergyConsumption; then changed "the module of 2017 counts energy"; fi
pip check >/dev/null || changed "pip check finds the two packages at odds"
echo "1, 2: pynvml.py is that of 2017, and pip check finds no fault"

pip uninstall --yes nvidia-ml-py3
"$python" -m pip show nvidia-ml-py >"$folder/shown" 2>/dev/null || changed "pip no longer lists nvidia-ml-py"
pip check >/dev/null || changed "pip check finds that a file is missing"
pip install nvidia-ml-py==13.615.71
if "$python" -c "import pynvml" 2>/dev/null; then changed "the module is there again"; fi
echo "3: pip lists nvidia-ml-py $(sed -n 's/^Version: //p' "$folder/shown"), and there is no pynvml.py"

pip install --force-reinstall nvidia-ml-py==13.615.71
has nvmlDeviceSetGpuLockedClocks || changed "a forced installation no longer helps"
echo "4: a forced installation brings the module back"
