"""A stand-in for `nvidia-smi -i UUID (-lgc MIN,MAX | -rgc | -pl WATTS)`, which acts on NVML in the
same way.

It exits with NVML's code, and prints what is wrong on stdout, as nvidia-smi does.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Execute the arguments, and return the exit status."""
    import pynvml

    _, uuid, option, *values = arguments
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        if option == "-lgc":
            least_mhz, greatest_mhz = map(int, values[0].split(","))
            pynvml.nvmlDeviceSetGpuLockedClocks(handle, least_mhz, greatest_mhz)
        elif option == "-rgc":
            pynvml.nvmlDeviceResetGpuLockedClocks(handle)
        else:
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(1000 * float(values[0])))
    except pynvml.NVMLError as error:
        print(f"Setting failed for GPU {uuid}: {error}\nTerminating early due to previous errors.")
        return int(error.value)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
