"""The energy of training with Lightning, in its logs.

Trainer(callbacks=[EnergyCallback("nvml:0")])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from perseus_planner.gpu.monitor import Monitor


class EnergyCallback(Callback):  # type: ignore[misc]
    """Logs `energy_j` and `average_w` of each epoch of training; the arguments are those of
    `Monitor`.
    """

    def __init__(self, *gpus: Any, **options: Any) -> None:
        super().__init__()
        self._arguments = (list(gpus) or None, options)

    def setup(self, *_: Any, **__: Any) -> None:
        """Open the GPUs."""
        gpus, options = self._arguments
        self._monitor = Monitor(gpus, **options)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin to measure."""
        self._window = self._monitor.window("epoch").begin()

    def on_train_epoch_end(self, _: Any, module: Any) -> None:
        """Log what was measured."""
        window = self._window.end()
        module.log_dict({"energy_j": window.energy_j, "average_w": window.average_w})

    def teardown(self, *_: Any, **__: Any) -> None:
        """Close the GPUs."""
        self._monitor.close()
